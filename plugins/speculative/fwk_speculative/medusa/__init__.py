"""Speculation with several heads on one hidden state, each for a place further on."""

from __future__ import annotations

from fwk import SpeculativeDecoderSpec, hookimpl
from fwk_speculative._common import DraftModelOptions, TreeHeadSpec, TreeOptions


class MedusaOptions(TreeOptions, DraftModelOptions):
    """Options of the ``medusa`` decoder."""


@hookimpl
def speculative_decoders() -> list[SpeculativeDecoderSpec]:
    return [
        TreeHeadSpec(
            name="medusa",
            load="fwk_speculative.medusa.decoder:MedusaDecoder",
            options=MedusaOptions,
            api=2,
            summary="Drafts with Medusa heads: one small network on the target's hidden state for each further token.",
        )
    ]
