"""Thinking is closed where its budget ends, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fwk.errors import BlameSequence
from fwk.types import SamplingParams
from fwk_sampling.thinking_budget.processor import ThinkingBudget

VOCAB = 50
OPEN, CLOSE, END = 40, 41, [30, 31, 41, 32]
FREE = None


def asked(budget: int, opens: Sequence[int] = (), closes: Sequence[Sequence[int]] = ((CLOSE,),)) -> dict[str, Any]:
    return {
        "thinking_token_budget": budget,
        "thinking_marks": {"opens": list(opens), "closes": [list(close) for close in closes], "end": END},
    }


@pytest.mark.parametrize(
    ("extra", "generated", "token"),
    [
        (asked(3), [1, 2], FREE),
        (asked(3), [1, 2, 3], 30),
        (asked(3), [1, 2, 3, 30], 31),
        (asked(3), [1, 2, 3, 30, 31, 41], 32),
        (asked(3), [1, 2, 3, *END], FREE),
        (asked(3), [1, 2, 3, *END, 9], FREE),
        (asked(3), [1, CLOSE, 3], FREE),  # closed in time
        (asked(3), [1, 2, CLOSE, 9, 9, 9], FREE),
        (asked(3), [1, 2, 3, CLOSE, 9], FREE),  # something else had its way: it stays
        (asked(0), [], 30),
        (asked(0, [OPEN]), [], FREE),
        (asked(0, [OPEN]), [OPEN], 30),
        (asked(1, [OPEN]), [1, OPEN], FREE),
        (asked(1, [OPEN]), [1, OPEN, 2], 30),
        (asked(1, [OPEN]), [1, 2, 3], FREE),  # an answer without thinking
        (asked(1, [OPEN]), [1, 2, 3, 4, 5, OPEN, 7], FREE),
        (asked(1, [OPEN, 42]), [OPEN, 42, 1, 30], 31),
        (asked(2, [OPEN]), [OPEN, CLOSE, 1, 2, 3], FREE),
    ],
)
def test_what_comes_next(apply: Any, extra: dict[str, Any], generated: list[int], token: int | None) -> None:
    prompt = [OPEN, CLOSE, 30]
    logits = torch.randn(1, VOCAB)
    out = apply(ThinkingBudget, logits, [{"extra": extra}], [[*prompt, *generated]], [len(prompt)])
    if token is FREE:
        assert torch.equal(out, logits)
    else:
        assert out[0].isfinite().nonzero().flatten().tolist() == [token]


def test_a_mark_may_be_written_with_other_tokens(make_context: Any, make_view: Any) -> None:
    """``</`` and ``think>`` close as well as the three tokens that encoding the mark gives."""
    texts = [b"x"] * VOCAB
    texts[1:7] = [b"</", b"think", b">", b"think>", b"a</", b"b"]
    context = replace(make_context(VOCAB), token_bytes=lambda: texts)
    for generated, token in (([5, 4, 6], FREE), ([5, 6, 4], 30)):
        processor = ThinkingBudget(context)
        assert processor.add(5, SamplingParams(extra=asked(3, closes=[[1, 2, 3], [7, 7]])))
        out = processor.apply(torch.zeros(1, VOCAB), make_view([[9, *generated]], [1]))
        assert (int(out[0].argmax()) if out[0].isinf().any() else None) == token


def test_without_marks_it_is_refused(make_context: Any) -> None:
    processor = ThinkingBudget(make_context(VOCAB))
    assert processor.add(5, SamplingParams(extra={"thinking_token_budget": -1})) is False
    with pytest.raises(BlameSequence, match="thinking_token_budget is for chats"):
        processor.add(5, SamplingParams(extra={"thinking_token_budget": 0}))
