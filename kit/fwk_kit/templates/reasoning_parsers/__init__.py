"""Thinking between <mine> and </mine>."""

from __future__ import annotations

from fwk import ReasoningParserSpec, hookimpl


@hookimpl
def reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="mine",
            load="fwk_mine.plugin:MineReasoningParser",
            summary="thinking between <mine> and </mine>",
        )
    ]
