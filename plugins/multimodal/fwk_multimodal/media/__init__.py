"""Media in prompts: the engine cuts prompts at them, and each worker encodes them when a step comes to their tokens."""

from __future__ import annotations

import json

import msgspec
from pydantic import field_validator

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.errors import ConfigError
from fwk.interfaces.feature import FeatureRun, Wire
from fwk.interfaces.multimodal import MEDIA_SPAN, Media


class MediaOptions(Options):
    """Options of ``features.media``."""

    enable_multimodal: bool = option(
        True,
        "Take images and the like where the model does; false: text alone, and what encodes them is not loaded.",
        stability="beta",
    )
    mm_processor_kwargs: str = option(
        "{}",
        "JSON object of preprocessor_config.json's fields to replace, by which media become what the model encodes.",
        stability="beta",
    )
    limit_mm_per_prompt: str = option(
        "{}",
        "How many media of a kind a prompt may have, as image=4 or a JSON object; 0: none (default: 16 of each).",
        stability="beta",
    )
    max_image_pixels: int = option(
        2**25,
        "Width times height of the largest image that is decoded; larger ones are refused (400).",
        stability="beta",
        ge=1,
        le=2**30,
    )
    allowed_local_media_path: str = option(
        "",
        "Folder of images and the like that requests may name as file:///...; files elsewhere, also by symbolic links, "
        "are refused (default: all are).",
        stability="beta",
    )
    allowed_media_hosts: tuple[str, ...] = option(
        (),
        "Hosts from which images and the like are fetched by their http: or https: URLs: example.org, *.example.org, "
        "10.0.0.7:8080. Names must lead to public addresses (default: nothing is fetched).",
        stability="beta",
    )
    max_media_bytes: int = option(
        16 * 2**20, "Bytes of the largest image or the like that a request may bring.", stability="beta", ge=1, le=2**31
    )
    mm_payload_bytes: int = option(
        2**31,
        "Bytes of temporary files with decoded images of requests that wait or run; beyond, requests with more of them "
        "are refused with 503.",
        stability="beta",
        ge=1,
        le=2**50,
    )
    mm_encoder_cache_bytes: int = option(
        2**28,
        "Bytes that a worker keeps of encoded images and the like, by content, so that those of earlier turns are not "
        "encoded again; those used least recently go first. 0: none.",
        stability="beta",
        ge=0,
        le=2**40,
    )

    @field_validator("mm_processor_kwargs")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object")
        return text


class MediaSpec(FeatureSpec):
    """Takes the kinds of media that a model encodes, and refuses workers that could not read their files."""

    def takes(self, kinds: frozenset[str], options: MediaOptions) -> frozenset[str]:
        return kinds if options.enable_multimodal else frozenset()

    def check_run(self, run: FeatureRun, options: MediaOptions) -> None:
        span = int(run.model_config.raw.get(MEDIA_SPAN, 0)) if run.media and run.model_config is not None else 0
        engine = run.config.engine
        if span and (0 < engine.chunked_prefill_size < span or run.step_tokens < span + engine.max_running_requests):
            raise ConfigError(
                f"{run.model} computes the {span} tokens of an image in one step, for they see each other: serve it "
                f"with --chunked-prefill-size {span} or more, and --max-prefill-tokens "
                f"{span + engine.max_running_requests} or more (those, and one for each of --max-running-requests)"
            )
        if run.media and not run.is_local:
            raise ConfigError(
                f"{run.model} takes {' and '.join(sorted(run.media))}, which workers read from files, and executor "
                f"'{run.chosen['executors'].name}' has workers on other machines: serve it on one, or text alone with "
                "--enable-multimodal false"
            )


class PromptMedia(msgspec.Struct, frozen=True, array_like=True):
    """The media of a prompt, in the order of their tokens."""

    media: list[Media]


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        MediaSpec(
            name="media",
            server="fwk_multimodal.media.server:MediaRequests",
            job="fwk_multimodal.media.server:MediaJobs",
            engine="fwk_multimodal.media.engine:MediaPrompts",
            worker="fwk_multimodal.media.worker:MediaRows",
            wire=Wire(request=PromptMedia, sequence=PromptMedia),
            options=MediaOptions,
            server_options=("allowed_local_media_path", "allowed_media_hosts", "max_media_bytes", "mm_payload_bytes"),
            summary="images and the like in prompts, of models that take them",
        )
    ]
