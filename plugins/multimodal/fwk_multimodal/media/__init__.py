"""Media in prompts: the engine cuts prompts at them, and each worker encodes them when a step comes to their tokens.

With ``--mm-encoder-workers`` processes of the server encode them before the engine has the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec
from pydantic import field_validator

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.config import Config
from fwk.errors import ConfigError
from fwk.interfaces.feature import FeatureRun, Wire
from fwk.interfaces.multimodal import MEDIA_SPAN, Media

_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.%]+\]|[^/:\[\]@?#\s]+)(:[0-9]{1,5})?/?")


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
    mm_processor_cache_bytes: int = option(
        2**28,
        "Bytes of temporary files that a server keeps of decoded images and the like, by content and beside "
        "--mm-payload-bytes, so that those of earlier requests are not decoded again; those used least recently go "
        "first. 0: none.",
        stability="beta",
        ge=0,
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
    mm_encoder_step_tokens: int = option(
        0,
        "Tokens of images and the like that one step of an engine encodes, over all requests, where it was not seen "
        "before; one piece it always may. 0: on a CPU one piece, on a device all that a step comes to.",
        stability="beta",
        ge=0,
        le=2**20,
    )
    mm_encoder_workers: int = option(
        0,
        "Processes that encode images and the like, so that steps of the engine wait for none; each loads the encoder, "
        "and engines do not. 0: each worker of an engine encodes, in its steps.",
        aliases=("visual_dp",),
        stability="beta",
        ge=0,
        le=64,
    )
    mm_encoder_batch_size: int = option(
        8,
        "Images, tiles or the like that one of --mm-encoder-workers takes at once, of all requests that wait.",
        aliases=("visual_infer_batch_size",),
        needs="mm_encoder_workers",
        stability="beta",
        ge=1,
        le=4096,
    )
    mm_encoder_threads: int = option(
        0,
        "CPU threads of each of --mm-encoder-workers. 0: the cores divided by the number of workers and one.",
        needs="mm_encoder_workers",
        stability="beta",
        ge=0,
        le=1024,
    )
    mm_encoder_niceness: int = option(
        10,
        "How much the system prefers engines to --mm-encoder-workers on the same cores: 0, not at all, to 19.",
        needs="mm_encoder_workers",
        stability="beta",
        ge=0,
        le=19,
    )
    mm_encoder_devices: tuple[int, ...] = option(
        (),
        "Device of each of --mm-encoder-workers, as 0 1 2; numbers are used in turn (default: 0, which an engine has, "
        "too).",
        aliases=("visual_gpu_ids",),
        needs="mm_encoder_workers",
        stability="beta",
    )

    encoder_only: bool = option(
        False,
        "Encode images and the like for servers that name this one in --encoder-servers, and nothing else: no engine "
        "is started.",
        stability="experimental",
    )
    encoder_servers: tuple[str, ...] = option(
        (),
        "Servers of --encoder-only that encode images and the like for this one, as http://HOST:PORT, with the same "
        "model; where one cannot be reached, another is asked.",
        stability="experimental",
    )
    encoder_token_file: str | None = option(
        None,
        "File with a secret of 16 bytes or more, the same on servers of --encoder-only and --encoder-servers: without "
        "it none encodes (openssl rand -hex 32 makes one).",
        stability="experimental",
        min_length=1,
    )

    @field_validator("encoder_servers")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not _URL.fullmatch(url):
                raise ValueError(f"--encoder-servers {url}: must be http://HOST:PORT or https://HOST:PORT")
        return urls

    @field_validator("mm_encoder_devices")
    @classmethod
    def _are_numbers(cls, numbers: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 0 <= number < 2**10 for number in numbers):
            raise ValueError("--mm-encoder-devices must be numbers of devices, from 0 on")
        return numbers

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


def encodes_apart(options: MediaOptions | None) -> bool:
    """Whether media are encoded before the engine has their request."""
    return options is not None and (options.mm_encoder_workers > 0 or bool(options.encoder_servers))


def _encodes_with(options: MediaOptions) -> str:
    """The options by which something other than an engine encodes, as the user gives them; empty: nothing does."""
    given = [
        f"--mm-encoder-workers {options.mm_encoder_workers}" * bool(options.mm_encoder_workers),
        f"--encoder-servers {' '.join(options.encoder_servers)}" * bool(options.encoder_servers),
        "--encoder-only" * options.encoder_only,
    ]
    return " and ".join(filter(None, given))


class MediaSpec(FeatureSpec):
    """Takes the kinds of media that a model encodes, and refuses workers that could not read their files."""

    def takes(self, kinds: frozenset[str], options: MediaOptions) -> frozenset[str]:
        return kinds if options.enable_multimodal else frozenset()

    def check_server(self, configs: Sequence[Config], options: MediaOptions) -> None:
        given = _encodes_with(options)
        if given and len(configs) > 1:
            raise ConfigError(f"{given} is for a server of one model: this one has {len(configs)}, which come and go")
        if options.encoder_servers and (options.mm_encoder_workers or options.encoder_only):
            raise ConfigError(f"{given} are not possible together: media are encoded here or there")
        is_shared = options.encoder_only or bool(options.encoder_servers)
        if is_shared and options.encoder_token_file is None:
            raise ConfigError(
                f"{given} needs --encoder-token-file FILE, with one secret on all these servers: without it, anyone "
                "could have media encoded (openssl rand -hex 32 > FILE makes one)"
            )
        if not is_shared and options.encoder_token_file is not None:
            raise ConfigError(
                "--encoder-token-file does nothing without --encoder-only or --encoder-servers: add one of them, or "
                "leave it out"
            )
        for key in configs[0].plugin_options if options.encoder_only else ():
            if key.startswith("engine_pools.") and key != "engine_pools.encoder_only":
                raise ConfigError(f"--encoder-only starts no engine: leave out what {key} is for")

    def check_run(self, run: FeatureRun, options: MediaOptions) -> None:
        given = _encodes_with(options)
        if given and not run.media:
            raise ConfigError(f"{given}: {run.model} takes text alone here, which needs no encoder")
        span = int(run.model_config.raw.get(MEDIA_SPAN, 0)) if run.media and run.model_config is not None else 0
        engine = run.config.engine
        if span and (0 < engine.chunked_prefill_size < span or run.step_tokens < span + engine.max_running_requests):
            raise ConfigError(
                f"{run.model} computes the {span} tokens of an image in one step, for they see each other: serve it "
                f"with --chunked-prefill-size {span} or more, and --max-prefill-tokens "
                f"{span + engine.max_running_requests} or more (those, and one for each of --max-running-requests)"
            )
        if run.media and engine.pipeline_parallel_size > 1:
            raise ConfigError(
                f"{run.model} takes {' and '.join(sorted(run.media))}, which the worker that has all layers encodes: "
                "leave --pipeline-parallel-size out, or serve text alone with --enable-multimodal false"
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
            server_options=(
                "allowed_local_media_path",
                "allowed_media_hosts",
                "max_media_bytes",
                "mm_payload_bytes",
                "mm_encoder_workers",
                "mm_encoder_batch_size",
                "mm_encoder_threads",
                "mm_encoder_niceness",
                "mm_encoder_devices",
                "encoder_only",
                "encoder_servers",
                "encoder_token_file",
            ),
            summary="images and the like in prompts, of models that take them",
        )
    ]
