"""Tool calls as JSON between ``<tool_call>`` and ``</tool_call>``: Hermes, Qwen 2.5 and 3, and their like."""

from fwk import ToolParserSpec, hookimpl


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="hermes",
            load="fwk_parsers.hermes.parser:HermesParser",
            template_marks=("<tool_call>", "</tool_call>", '"arguments"'),
            also_called=("qwen", "qwen2.5", "qwen3", "granite4"),
            summary='Calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>',
        )
    ]
