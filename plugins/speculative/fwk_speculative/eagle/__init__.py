"""Heads that draft from the target's hidden states: EAGLE and EAGLE-3, in the layouts published for SGLang and vLLM."""

from __future__ import annotations

from fwk import SpeculativeDecoderSpec, hookimpl
from fwk_speculative._common import DraftModelOptions, TreeHeadSpec, TreeOptions


class EagleOptions(TreeOptions, DraftModelOptions):
    """Options of the ``eagle`` and ``eagle3`` decoders."""


@hookimpl
def speculative_decoders() -> list[SpeculativeDecoderSpec]:
    return [
        TreeHeadSpec(
            name="eagle",
            load="fwk_speculative.eagle.decoder:EagleDecoder",
            options=EagleOptions,
            api=2,
            summary="Drafts with an EAGLE head, which continues from the target's last hidden states.",
        ),
        TreeHeadSpec(
            name="eagle3",
            load="fwk_speculative.eagle.decoder:Eagle3Decoder",
            options=EagleOptions,
            api=2,
            summary="Drafts with an EAGLE-3 head, which continues from hidden states of three of the target's layers.",
        ),
    ]
