"""Tool calls of DeepSeek: V3 and R1, V3.1, V3.2.

The formats of the models' chat templates and cards. V3 and R1-0528: a section of calls, each ``function``, a
separator, the name, and the arguments in a fence of Markdown. V3.1: the name, a separator, the arguments. V3.2
(``encoding`` folder of the model's repository): ``invoke`` elements with a ``parameter`` element for each argument,
whose names begin with ``DSML`` between bars; arguments that are no strings are JSON.
"""

from fwk import ToolParserSpec, hookimpl

_SECTION = "<｜tool▁calls▁begin｜>"  # noqa: RUF001


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="deepseek-v3",
            load="fwk_parsers.deepseek.parser:DeepSeekV3Parser",
            template_marks=(_SECTION, "```json"),
            also_called=("deepseek-r1",),
            rank=20,
            summary="Calls with their arguments in a fence of JSON: DeepSeek V3, R1",
        ),
        ToolParserSpec(
            name="deepseek-v3.1",
            load="fwk_parsers.deepseek.parser:DeepSeekV31Parser",
            template_marks=(_SECTION,),
            rank=10,
            summary="Calls as name, separator and arguments: DeepSeek V3.1",
        ),
        ToolParserSpec(
            name="deepseek-v3.2",
            load="fwk_parsers.deepseek.dsml:DeepSeekV32Parser",
            template_marks=("｜DSML｜",),  # noqa: RUF001
            rank=30,
            summary="Calls in DSML, an argument at a time: DeepSeek V3.2",
        ),
    ]
