"""Thinking between marks: ``<think>`` and ``</think>`` of Qwen3, DeepSeek-R1 and their like, and other models' marks.

All parsers know a template that opens the thinking itself, by the end of the prompt. ``deepseek-r1``, ``minimax`` and
``step3`` take the output for thinking also when nothing opened it, as those models leave the opening mark out.

The marks are those of the models' chat templates and cards. Magistral has ``[THINK]`` tokens (mistral-common, version
13), Kimi-VL ``◁think▷``; Granite 3.2 writes "Here is my thought process:" and "Here is my response:", 3.3 ``<think>``
and ``<response>``; Hunyuan-A13B puts ``<answer>`` around its answer.
"""

from fwk import ReasoningParserSpec, hookimpl

_MODULE = "fwk_parsers.think.parser"


@hookimpl
def reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="qwen3",
            load=f"{_MODULE}:ThinkParser",
            template_marks=("</think>",),
            also_called=("qwen3-thinking", "olmo3", "ernie45", "nemotron", "interns1", "holo2"),
            summary="Thinking between <think> and </think>",
        ),
        ReasoningParserSpec(
            name="deepseek-r1",
            load=f"{_MODULE}:AlwaysThinks",
            summary="As qwen3, for models that think without saying <think>",
        ),
        ReasoningParserSpec(
            name="deepseek-v3.1",
            load=f"{_MODULE}:ThinkParser",
            template_marks=("</think>", "<｜Assistant｜>", "thinking"),  # noqa: RUF001
            also_called=("deepseek-v3", "deepseek-v3.2"),
            rank=20,
            summary="As qwen3: the prompt opens or closes the thinking of DeepSeek V3.1 and V3.2",
        ),
        ReasoningParserSpec(
            name="glm-4.5",
            load=f"{_MODULE}:ThinkParser",
            template_marks=("</think>", "<arg_key>"),
            also_called=("glm47",),
            rank=20,
            summary="As qwen3: GLM-4.5 to 4.7",
        ),
        ReasoningParserSpec(
            name="kimi-k2",
            load=f"{_MODULE}:KimiThinks",
            template_marks=("</think>", "<|tool_calls_section_begin|>"),
            rank=20,
            summary="As qwen3, and tool calls end the thinking: Kimi K2 Thinking",
        ),
        ReasoningParserSpec(
            name="kimi",
            load=f"{_MODULE}:KimiVisionThinks",
            template_marks=("◁think▷",),
            rank=20,
            summary="Thinking between ◁think▷ and ◁/think▷: Kimi-VL Thinking",
        ),
        ReasoningParserSpec(
            name="minimax",
            load=f"{_MODULE}:AlwaysThinks",
            template_marks=("</think>", "<minimax:tool_call>"),
            also_called=("minimax-m2",),
            rank=20,
            summary="As deepseek-r1: MiniMax-M2 leaves <think> out",
        ),
        ReasoningParserSpec(
            name="step3",
            load=f"{_MODULE}:AlwaysThinks",
            also_called=("step3p5", "step3.5"),
            summary="As deepseek-r1: Step 3 and 3.5 leave <think> out",
        ),
        ReasoningParserSpec(
            name="mistral",
            load=f"{_MODULE}:MistralThinks",
            template_marks=("[THINK]", "[/THINK]"),
            also_called=("magistral",),
            rank=20,
            summary="Thinking between [THINK] and [/THINK]: Magistral, Ministral 3",
        ),
        ReasoningParserSpec(
            name="granite",
            load=f"{_MODULE}:GraniteThinks",
            template_marks=("Here is my thought process:",),
            rank=20,
            summary='Thinking behind "Here is my thought process:", the answer behind "Here is my response:": Granite',
        ),
        ReasoningParserSpec(
            name="granite-3.3",
            load=f"{_MODULE}:GraniteThinks",
            template_marks=("</think>", "<response>"),
            rank=20,
            summary="As qwen3, with <response> around the answer: Granite 3.3",
        ),
        ReasoningParserSpec(
            name="hunyuan",
            load=f"{_MODULE}:HunyuanThinks",
            template_marks=("</think>", "<answer>"),
            also_called=("hunyuan-a13b",),
            rank=10,
            summary="As qwen3, with <answer> around the answer: Hunyuan-A13B",
        ),
    ]
