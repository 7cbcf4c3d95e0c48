"""Tool calls as plain JSON, one object after another, at the beginning of the answer.

For models whose chat template says nothing of tools, or speaks a format that no other parser reads: the server's
system message then teaches this one. Forced calls of formats without a grammar are written so, too.
"""

from fwk import ToolParserSpec, hookimpl


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="json",
            load="fwk_parsers.json.parser:JsonParser",
            is_fallback=True,
            rank=-100,
            summary='Calls as {"name": ..., "arguments": {...}}, for templates that know no tools',
        )
    ]
