"""Tool calls whose arguments are written one by one: Qwen3-Coder, Seed-OSS, GLM-4.5, MiniMax-M2.

The formats of the models' chat templates. Qwen3-Coder (also Qwen 3.5, Step 3.5, Nemotron 3): ``<function=f>`` with one
``<parameter=x>`` for each argument, in ``<tool_call>``; Seed-OSS the same in ``<seed:tool_call>``. GLM-4.5 to 4.7: the
name, then ``<arg_key>`` and ``<arg_value>`` by turns. MiniMax-M2 (its tool calling guide): ``<invoke name="f">`` with
``<parameter name="x">``, in ``<minimax:tool_call>``. Values are plain text and get their type from the tool's schema.
"""

from fwk import ToolParserSpec, hookimpl

_MODULE = "fwk_parsers.xml_parameters.parser"


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="qwen3-coder",
            load=f"{_MODULE}:QwenCoderParser",
            template_marks=("<function=", "<parameter="),
            also_called=("qwen3_xml", "step3p5", "qwen3.5"),
            rank=10,
            summary="Calls as <function=f><parameter=x>...</parameter></function>: Qwen3-Coder",
        ),
        ToolParserSpec(
            name="seed-oss",
            load=f"{_MODULE}:SeedParser",
            template_marks=("seed:tool_call",),
            rank=20,
            summary="As qwen3-coder, in <seed:tool_call>: Seed-OSS",
        ),
        ToolParserSpec(
            name="glm-4.5",
            load=f"{_MODULE}:GlmParser",
            template_marks=("<arg_key>", "<arg_value>"),
            also_called=("glm", "glm47", "glm4_moe"),
            rank=20,
            summary="Calls as <tool_call>f<arg_key>x</arg_key><arg_value>...</arg_value></tool_call>: GLM-4.5 to 4.7",
        ),
        ToolParserSpec(
            name="minimax-m2",
            load=f"{_MODULE}:MiniMaxParser",
            template_marks=("<minimax:tool_call>",),
            rank=20,
            summary='Calls as <invoke name="f"><parameter name="x">...</parameter></invoke>: MiniMax-M2',
        ),
    ]
