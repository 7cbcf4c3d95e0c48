"""The marks of each format."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fwk_parsers._common.parameters import ParameterCalls


class QwenCoderParser(ParameterCalls):
    """Qwen3-Coder. The outer mark may be missing."""

    opens = ("<tool_call>",)
    starts = ("<function=",)
    can_start_alone = True
    closes = ("</tool_call>",)
    margin = "\n"
    head = re.compile(r"<function=(?P<name>[^>\n]+)>")
    parameter_begin = "<parameter="
    parameter = re.compile(r"<parameter=(?P<name>[^>\n]+)>")
    parameter_end = "</parameter>"
    ends = ("</function>",)

    def _frame(self) -> dict[str, str]:
        return {"begin": f"{self.opens[0]}\n", "separator": f"\n{self._reopening()}", "end": f"\n{self.closes[0]}"}

    def _reopening(self) -> str:
        """What stands between two calls: each is in a section of its own."""
        return f"{self.closes[0]}\n{self.opens[0]}\n"

    def _around_call(self, name: str) -> tuple[str, str]:
        return f"<function={name}>\n", "</function>"

    def _around_argument(self, name: str, *, is_string: bool) -> tuple[str, str]:
        return f"<parameter={name}>{self.margin}", f"{self.margin}{self.parameter_end}\n"

    def _written(self, name: str, values: Mapping[str, str], strings: set[str]) -> str:
        lines = [f"<parameter={key}>{self.margin}{value}{self.margin}</parameter>" for key, value in values.items()]
        return "\n".join([self.opens[0], f"<function={name}>", *lines, "</function>", self.closes[0]])


class SeedParser(QwenCoderParser):
    """Seed-OSS."""

    reads_special = True
    opens = ("<seed:tool_call>",)
    closes = ("</seed:tool_call>",)
    margin = ""


class MiniMaxParser(QwenCoderParser):
    """MiniMax-M2."""

    reads_special = True
    opens = ("<minimax:tool_call>",)
    starts = ("<invoke name=",)
    can_start_alone = False
    closes = ("</minimax:tool_call>",)
    margin = ""
    parameter_begin = "<parameter name="
    head = re.compile(r'<invoke name=(?P<quote>"?)(?P<name>[^">\n]+)(?P=quote)>')
    parameter = re.compile(r'<parameter name=(?P<quote>"?)(?P<name>[^">\n]+)(?P=quote)>')
    ends = ("</invoke>",)

    def _reopening(self) -> str:
        return ""

    def _around_call(self, name: str) -> tuple[str, str]:
        return f'<invoke name="{name}">\n', "</invoke>"

    def _around_argument(self, name: str, *, is_string: bool) -> tuple[str, str]:
        return f'<parameter name="{name}">', f"{self.parameter_end}\n"

    def _written(self, name: str, values: Mapping[str, str], strings: set[str]) -> str:
        lines = [f'<parameter name="{key}">{value}</parameter>' for key, value in values.items()]
        return "\n".join([self.opens[0], f'<invoke name="{name}">', *lines, "</invoke>", self.closes[0]])


class GlmParser(ParameterCalls):
    """GLM-4.5 to 4.7: the name stands behind the opening mark, the arguments' names between marks of their own."""

    reads_special = True
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)
    head = re.compile(r"\s*(?P<name>[\w.-]+)")
    parameter_begin = "<arg_key>"
    parameter = re.compile(r"<arg_key>(?P<name>[^<]*)</arg_key>\s*<arg_value>")
    parameter_end = "</arg_value>"

    def _begins(self, rest: str) -> bool:
        return not self._has_call and self.head.match(rest) is not None

    def _frame(self) -> dict[str, str]:
        close, open_ = self.closes[0], self.opens[0]
        return {"begin": open_, "separator": f"{close}\n{open_}", "end": close}

    def _around_call(self, name: str) -> tuple[str, str]:
        return f"{name}\n", ""

    def _around_argument(self, name: str, *, is_string: bool) -> tuple[str, str]:
        return f"<arg_key>{name}</arg_key>\n<arg_value>", f"{self.parameter_end}\n"

    def _written(self, name: str, values: Mapping[str, str], strings: set[str]) -> str:
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in values.items()]
        return "\n".join([f"{self.opens[0]}{name}", *pairs, self.closes[0]])
