"""The harmony format of gpt-oss: thinking, answer and tool calls are messages in channels.

OpenAI's cookbook, "OpenAI harmony response format": ``<|start|>ROLE<|channel|>CHANNEL to=RECIPIENT
<|constrain|>json<|message|>TEXT`` and ``<|end|>``, ``<|call|>`` or ``<|return|>``. The channel ``analysis`` is
thinking, ``final`` the answer, ``commentary`` calls (their recipient is ``functions.NAME``) and what the model says
before them. The prompt ends with ``<|start|>assistant``, so the first message begins in its header.
"""

from fwk import ReasoningParserSpec, ToolParserSpec, hookimpl

_MARKS = ("<|channel|>", "<|message|>", "commentary")


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="gpt-oss",
            load="fwk_parsers.harmony.tools:HarmonyTools",
            template_marks=_MARKS,
            also_called=("openai", "harmony"),
            rank=30,
            summary="Calls as messages to functions.NAME in the commentary channel: gpt-oss",
        )
    ]


@hookimpl
def reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="gpt-oss",
            load="fwk_parsers.harmony.channels:HarmonyChannels",
            template_marks=_MARKS,
            also_called=("openai_gptoss", "harmony"),
            rank=30,
            summary="Thinking in the analysis channel: gpt-oss",
        )
    ]
