"""Speculation with the layers that a checkpoint brings for it: multi-token prediction."""

from __future__ import annotations

from fwk import SpeculativeDecoderSpec, hookimpl
from fwk_speculative._common import TreeHeadSpec, TreeOptions


class MtpOptions(TreeOptions):
    """Options of the ``mtp`` decoder."""


@hookimpl
def speculative_decoders() -> list[SpeculativeDecoderSpec]:
    return [
        TreeHeadSpec(
            name="mtp",
            load="fwk_speculative.mtp.decoder:MtpDecoder",
            options=MtpOptions,
            api=2,
            summary="Drafts with the checkpoint's own layers for further tokens (DeepSeek-V3, GLM-4.5, Qwen3-Next).",
        )
    ]
