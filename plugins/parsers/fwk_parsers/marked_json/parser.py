"""The marks of each format."""

from __future__ import annotations

from fwk_parsers._common.marked_json import MarkedJson


class PhiParser(MarkedJson):
    """Phi-4-mini."""

    reads_special = True
    opens = ("<|tool_call|>", "functools")
    closes = ("<|/tool_call|>",)
    is_array = True


class GraniteParser(MarkedJson):
    """Granite 3.0 to 3.3."""

    reads_special = True
    opens = ("<|tool_call|>", "<tool_call>")
    is_array = True


class GraniteFunctionParser(MarkedJson):
    """Granite 20B function calling: the mark stands before each call."""

    reads_special = True
    opens = ("<function_call>",)
    are_marks_each = True

    def _around(self) -> tuple[str, str]:
        return f"{self.opens[0]} ", ""


class InternLMParser(MarkedJson):
    """InternLM 2, 2.5 and 3."""

    reads_special = True
    opens = ("<|action_start|>",)
    fillers = ("<|plugin|>",)
    closes = ("<|action_end|>",)
    arguments_key = "parameters"
    are_marks_each = True

    def _around(self) -> tuple[str, str]:
        return f"{self.opens[0]}<|plugin|>\n", self.closes[0]


class MiniMaxParser(MarkedJson):
    """MiniMax-M1."""

    opens = ("<tool_calls>",)
    closes = ("</tool_calls>",)
    margin = "\n"


class HunyuanParser(MarkedJson):
    """Hunyuan-A13B."""

    opens = ("<tool_calls>",)
    closes = ("</tool_calls>",)
    is_array = True


class NemotronParser(MarkedJson):
    """Nemotron Nano 2 and Super."""

    opens = ("<TOOLCALL>",)
    closes = ("</TOOLCALL>",)
    is_array = True
