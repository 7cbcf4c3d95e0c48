"""Speculation with a smaller model of the same vocabulary."""

from __future__ import annotations

from fwk import SpeculativeDecoderSpec, hookimpl
from fwk_speculative._common import DraftModelOptions


class StandaloneOptions(DraftModelOptions):
    """Options of the ``standalone`` decoder."""


@hookimpl
def speculative_decoders() -> list[SpeculativeDecoderSpec]:
    return [
        SpeculativeDecoderSpec(
            name="standalone",
            load="fwk_speculative.standalone.decoder:StandaloneDecoder",
            options=StandaloneOptions,
            api=2,
            summary="Drafts with a second, smaller model.",
        )
    ]
