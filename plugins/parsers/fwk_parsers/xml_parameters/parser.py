"""The marks of each format."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fwk_parsers._common.marked import Block, MarkBlock
from fwk_parsers._common.parameters import ParameterCalls


class QwenCoderParser(ParameterCalls):
    """Qwen3-Coder. The outer mark may be missing."""

    opens = ("<tool_call>",)
    starts = ("<function=",)
    can_start_alone = True
    closes = ("</tool_call>",)
    head = re.compile(r"<function=(?P<name>[^>\n]+)>")
    parameter = re.compile(r"<parameter=(?P<name>[^>\n]+)>")
    parameter_end = "</parameter>"
    ends = ("</function>",)

    def _start(self, rest: str) -> Block:
        return MarkBlock(self.ends, self.closes)

    def _written(self, name: str, values: Mapping[str, str], strings: set[str]) -> str:
        lines = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items()]
        return "\n".join([self.opens[0], f"<function={name}>", *lines, "</function>", self.closes[0]])


class SeedParser(QwenCoderParser):
    """Seed-OSS."""

    reads_special = True
    opens = ("<seed:tool_call>",)
    closes = ("</seed:tool_call>",)


class MiniMaxParser(QwenCoderParser):
    """MiniMax-M2."""

    reads_special = True
    opens = ("<minimax:tool_call>",)
    starts = ("<invoke name=",)
    can_start_alone = False
    closes = ("</minimax:tool_call>",)
    head = re.compile(r'<invoke name=(?P<quote>"?)(?P<name>[^">\n]+)(?P=quote)>')
    parameter = re.compile(r'<parameter name=(?P<quote>"?)(?P<name>[^">\n]+)(?P=quote)>')
    ends = ("</invoke>",)

    def _written(self, name: str, values: Mapping[str, str], strings: set[str]) -> str:
        lines = [f'<parameter name="{key}">{value}</parameter>' for key, value in values.items()]
        return "\n".join([self.opens[0], f'<invoke name="{name}">', *lines, "</invoke>", self.closes[0]])


class GlmParser(ParameterCalls):
    """GLM-4.5 to 4.7: the name stands behind the opening mark, the arguments' names between marks of their own."""

    reads_special = True
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)
    head = re.compile(r"\s*(?P<name>[\w.-]+)")
    parameter = re.compile(r"<arg_key>(?P<name>[^<]*)</arg_key>\s*<arg_value>")
    parameter_end = "</arg_value>"

    def _begins(self, rest: str) -> bool:
        return not self._has_call and self.head.match(rest) is not None

    def _start(self, rest: str) -> Block:
        return MarkBlock((), self.closes)

    def _written(self, name: str, values: Mapping[str, str], strings: set[str]) -> str:
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in values.items()]
        return "\n".join([f"{self.opens[0]}{name}", *pairs, self.closes[0]])
