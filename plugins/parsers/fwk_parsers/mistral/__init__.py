"""Tool calls of Mistral, in the two notations of its tokenisers.

mistral-common (``docs`` and the ``tokens`` package): up to version 7 ``[TOOL_CALLS][{"name": ..., "arguments": ...}]``,
from version 11 on ``[TOOL_CALLS]NAME[ARGS]{...}`` for each call, in version 11 itself with ``[CALL_ID]`` and an id
before the arguments. Some exports leave ``[ARGS]`` out.
"""

from fwk import ToolParserSpec, hookimpl


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="mistral",
            load="fwk_parsers.mistral.parser:MistralParser",
            template_marks=("[TOOL_CALLS]",),
            rank=10,
            summary="Calls behind [TOOL_CALLS]: a list of JSON, or name, [ARGS] and arguments",
        )
    ]
