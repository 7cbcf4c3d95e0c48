"""Tool calls as Python writes them: ``[f(a=1), g(b="x")]``.

``pythonic`` is Llama 4's and 3.2's: the prompt format of Meta's model cards, "[func_name1(params_name1=params_value1,
...), func_name2(params)]", as the whole answer, perhaps between ``<|python_start|>`` and ``<|python_end|>``. ``lfm2``
is the same between ``<|tool_call_start|>`` and ``<|tool_call_end|>``, as LiquidAI documents it. ``olmo`` has one call a
line between ``<function_calls>`` and ``</function_calls>``, as OLMo 3's chat template says.
"""

from fwk import ToolParserSpec, hookimpl


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="pythonic",
            load="fwk_parsers.pythonic.parser:PythonicParser",
            template_marks=("[func_name1(",),
            also_called=("llama4_pythonic", "llama4"),
            rank=10,
            summary='Calls as [f(a=1), g(b="x")]: Llama 4 and 3.2',
        ),
        ToolParserSpec(
            name="lfm2",
            load="fwk_parsers.pythonic.parser:LfmParser",
            template_marks=("<|tool_call_start|>",),
            rank=10,
            summary="Calls as <|tool_call_start|>[f(a=1)]<|tool_call_end|>: LFM2",
        ),
        ToolParserSpec(
            name="olmo",
            load="fwk_parsers.pythonic.parser:OlmoParser",
            template_marks=("<function_calls>",),
            also_called=("olmo3",),
            rank=5,
            summary="Calls as <function_calls>f(a=1)</function_calls>, one a line: OLMo 3",
        ),
    ]
