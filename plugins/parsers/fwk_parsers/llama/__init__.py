"""Tool calls of Llama 3.1 to 3.3 and of Llama 4 as JSON: ``{"name": ..., "parameters": {...}}`` as the whole answer.

The format is what the models' chat templates ask for ("Respond in the format {"name": function name, "parameters":
dictionary of argument name and its value}"). ``<|python_tag|>`` may stand before it, as in Meta's description of
built-in tools; calls are separated by ``;``.
"""

from fwk import ToolParserSpec, hookimpl


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="llama3-json",
            load="fwk_parsers.llama.parser:LlamaParser",
            template_marks=('"parameters": dictionary of argument name',),
            also_called=("llama3", "llama4_json"),
            rank=5,
            summary='Calls as {"name": ..., "parameters": {...}} and nothing else, perhaps behind <|python_tag|>',
        )
    ]
