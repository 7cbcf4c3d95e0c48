"""Thinking between ``<think>`` and ``</think>``: Qwen3, DeepSeek-R1 and their like.

Both parsers know a template that opens the thinking itself, by the end of the prompt. ``deepseek-r1`` takes the output
for thinking also when nothing opened it, as the first templates of that model need.
"""

from fwk import ReasoningParserSpec, hookimpl


@hookimpl
def reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="qwen3",
            load="fwk_parsers.think.parser:ThinkParser",
            template_marks=("</think>",),
            summary="Thinking between <think> and </think>",
        ),
        ReasoningParserSpec(
            name="deepseek-r1",
            load="fwk_parsers.think.parser:AlwaysThinks",
            summary="As qwen3, for models that think without saying <think>",
        ),
    ]
