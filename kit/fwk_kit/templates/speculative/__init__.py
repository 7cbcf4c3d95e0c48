"""Drafts what followed the newest token the last time."""

from __future__ import annotations

from fwk import Options, SpeculativeDecoderSpec, hookimpl, option


class MineOptions(Options):
    """Options of ``speculative.mine``."""

    mine_num_drafts: int = option(4, "Tokens drafted in a step.", ge=1, le=32)


@hookimpl
def speculative_decoders() -> list[SpeculativeDecoderSpec]:
    return [
        SpeculativeDecoderSpec(
            name="mine",
            load="fwk_mine.plugin:MineDecoder",
            options=MineOptions,
            api=2,
            summary="drafts what followed the newest token the last time",
        )
    ]
