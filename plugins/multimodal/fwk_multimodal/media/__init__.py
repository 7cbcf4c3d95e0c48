"""Media in prompts: the engine cuts prompts at them, and each worker encodes them when a step comes to their tokens."""

from __future__ import annotations

import msgspec

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.interfaces.feature import Wire
from fwk.types import Media


class MediaOptions(Options):
    """Options of ``features.media``."""

    mm_encoder_cache_bytes: int = option(
        2**28,
        "Bytes that a worker keeps of encoded images and the like, by content, so that those of earlier turns are not "
        "encoded again; those used least recently go first. 0: none.",
        stability="beta",
        ge=0,
        le=2**40,
    )


class PromptMedia(msgspec.Struct, frozen=True, array_like=True):
    """The media of a prompt, in the order of their tokens."""

    media: list[Media]


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="media",
            server="fwk_multimodal.media.server:MediaRequests",
            engine="fwk_multimodal.media.engine:MediaPrompts",
            worker="fwk_multimodal.media.worker:MediaRows",
            wire=Wire(request=PromptMedia, sequence=PromptMedia),
            options=MediaOptions,
            summary="images and the like in prompts, of models that take them",
        )
    ]
