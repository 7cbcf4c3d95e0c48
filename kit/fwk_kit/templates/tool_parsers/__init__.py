"""Tool calls between <call> and </call>."""

from __future__ import annotations

from fwk import ToolParserSpec, hookimpl


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="mine",
            load="fwk_mine.plugin:MineToolParser",
            summary="tool calls between <call> and </call>",
        )
    ]
