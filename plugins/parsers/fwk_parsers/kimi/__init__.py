"""Tool calls of Kimi K2.

The model's tool-call guide and chat template: ``<|tool_calls_section_begin|>``, then for each call
``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>``, then
``<|tool_calls_section_end|>``.
"""

from fwk import ToolParserSpec, hookimpl


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="kimi-k2",
            load="fwk_parsers.kimi.parser:KimiParser",
            template_marks=("<|tool_calls_section_begin|>",),
            also_called=("kimi",),
            rank=10,
            summary="Calls as <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}: Kimi K2",
        )
    ]
