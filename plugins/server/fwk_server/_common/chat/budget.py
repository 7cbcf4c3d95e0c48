"""Budgets of thinking: what a logits processor has to know of the model's marks."""

from __future__ import annotations

from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend
from fwk_server._common.chat.other_names import fields_of

FIELD = "thinking_token_budget"
MESSAGE = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
)
"""What Qwen3 was tried with (2505.09388, section 4.3)."""


def can_budget(frontend: Frontend) -> bool:
    """Whether this server can end the thinking of its model."""
    parser = frontend.reasoning_parser() if FIELD in fields_of(frontend.processor_params) else None
    return parser is not None and parser.thinking_marks() is not None


def with_marks(
    extra: dict[str, Any], prompt_tail: str, frontend: Frontend, *, is_constrained: bool
) -> dict[str, Any] | None:
    """The fields of logits processors, with the tokens that the budget among them needs. Raises ``InvalidRequest``.

    An answer that a grammar binds from its first token on has no thinking in it, and keeps every budget.
    """
    if is_constrained:
        return {name: value for name, value in extra.items() if name != FIELD} or None
    parser = frontend.reasoning_parser(prompt_tail)
    marks = parser.thinking_marks() if parser is not None else None
    if marks is None:
        raise InvalidRequest(
            f"{FIELD}: this server does not tell thinking from the answer, so it cannot end it (--reasoning-parser)",
            FIELD,
        )
    encode = frontend.text.encode
    given = extra.get("reasoning_budget_message")
    message = encode(MESSAGE if given is None else given, False, False)
    found = {
        "opens": encode(marks.opens, False) if marks.opens else [],
        "closes": [encode(close, False) for close in marks.closes],
        "end": [*message, *encode(marks.end, False)],
    }
    return {**extra, "thinking_marks": found}
