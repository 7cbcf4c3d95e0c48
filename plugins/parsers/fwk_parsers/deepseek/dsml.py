"""DeepSeek V3.2's markup."""

# ruff: noqa: RUF001 (the marks are made of full-width bars)

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fwk_parsers._common.parameters import ParameterCalls
from fwk_parsers._common.typed import coerced, typed

_INVOKE, _INVOKE_END = "<｜DSML｜invoke", "</｜DSML｜invoke>"
_SECTION, _SECTION_END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"


class DeepSeekV32Parser(ParameterCalls):
    """An attribute tells whether a value is a string; all others are JSON."""

    reads_special = True
    opens = (_SECTION,)
    starts = (_INVOKE,)
    can_start_alone = True
    closes = (_SECTION_END,)
    head = re.compile(r'<｜DSML｜invoke\s+name="(?P<name>[^">\n]+)"\s*>')
    parameter_begin = "<｜DSML｜parameter"
    parameter = re.compile(
        r'<｜DSML｜parameter\s+name="(?P<name>[^">\n]+)"(?:\s+string="(?P<is_string>true|false)")?\s*>'
    )
    parameter_end = "</｜DSML｜parameter>"
    ends = (_INVOKE_END,)

    def _value(self, start: re.Match[str], text: str, schema: Any, root: Any) -> Any:
        is_string = start.group("is_string")
        if is_string is None:
            return typed(text, schema, root)
        return text if is_string == "true" else coerced(typed(text, None), schema, root)

    def _frame(self) -> dict[str, str]:
        return {"begin": f"{_SECTION}\n", "separator": "\n", "end": f"\n{_SECTION_END}"}

    def _around_call(self, name: str) -> tuple[str, str]:
        return f'{_INVOKE} name="{name}">\n', _INVOKE_END

    def _around_argument(self, name: str, *, is_string: bool) -> tuple[str, str]:
        kind = str(is_string).lower()
        return f'<｜DSML｜parameter name="{name}" string="{kind}">', f"{self.parameter_end}\n"

    def _written(self, name: str, values: Mapping[str, str], strings: set[str]) -> str:
        lines = [
            f'<｜DSML｜parameter name="{key}" string="{str(key in strings).lower()}">{value}{self.parameter_end}'
            for key, value in values.items()
        ]
        call = "\n".join([f'{_INVOKE} name="{name}">', *lines, _INVOKE_END])
        return f"{_SECTION}\n{call}\n{_SECTION_END}"
