"""Tool calls as JSON objects between marks: Phi-4, Granite, InternLM, MiniMax-M1, Hunyuan, Nemotron.

Each format is the one of the model's chat template. Granite 3 lists calls behind ``<|tool_call|>`` (3.1 wrote
``<tool_call>``; Granite 4 speaks ``hermes``), Granite 20B behind ``<function_call>``. Phi-4-mini writes them between
``<|tool_call|>`` and ``<|/tool_call|>``, or behind ``functools``. InternLM 2 and 3 put each between
``<|action_start|><|plugin|>`` and ``<|action_end|>``, MiniMax-M1 one a line between ``<tool_calls>`` and
``</tool_calls>``, Hunyuan-A13B (and Jamba) a list between these, Nemotron a list between ``<TOOLCALL>`` and
``</TOOLCALL>``.
"""

from fwk import ToolParserSpec, hookimpl

_MODULE = "fwk_parsers.marked_json.parser"


@hookimpl
def tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="phi-4",
            load=f"{_MODULE}:PhiParser",
            template_marks=("<|tool|>", "<|/tool|>"),
            also_called=("phi4", "phi4_mini", "phi4_mini_json"),
            rank=10,
            summary="Calls as <|tool_call|>[{...}]<|/tool_call|>: Phi-4-mini",
        ),
        ToolParserSpec(
            name="granite",
            load=f"{_MODULE}:GraniteParser",
            template_marks=("<|start_of_role|>", "<|tool_call|>"),
            also_called=("granite3",),
            rank=10,
            summary="Calls as <|tool_call|>[{...}]: Granite 3",
        ),
        ToolParserSpec(
            name="granite-20b",
            load=f"{_MODULE}:GraniteFunctionParser",
            template_marks=("<function_call>", "<|function_call_library|>"),
            also_called=("granite-20b-fc",),
            rank=10,
            summary="Calls as <function_call> {...}: Granite 20B function calling",
        ),
        ToolParserSpec(
            name="internlm",
            load=f"{_MODULE}:InternLMParser",
            template_marks=("<|plugin|>",),
            also_called=("internlm2", "internlm3"),
            rank=10,
            summary="Calls as <|action_start|><|plugin|>{...}<|action_end|>: InternLM 2 and 3",
        ),
        ToolParserSpec(
            name="minimax",
            load=f"{_MODULE}:MiniMaxParser",
            template_marks=("<tool_calls>", "<beginning_of_sentence>"),
            also_called=("minimax-m1",),
            rank=10,
            summary="Calls one a line between <tool_calls> and </tool_calls>: MiniMax-M1",
        ),
        ToolParserSpec(
            name="hunyuan",
            load=f"{_MODULE}:HunyuanParser",
            template_marks=("<tool_calls>",),
            also_called=("hunyuan-a13b", "jamba"),
            rank=5,
            summary="Calls as <tool_calls>[{...}]</tool_calls>: Hunyuan-A13B, Jamba",
        ),
        ToolParserSpec(
            name="nemotron",
            load=f"{_MODULE}:NemotronParser",
            template_marks=("<TOOLCALL>",),
            also_called=("nemotron_json", "nemotron_nano_v2"),
            rank=10,
            summary="Calls as <TOOLCALL>[{...}]</TOOLCALL>: Nemotron Nano 2 and Super",
        ),
    ]
