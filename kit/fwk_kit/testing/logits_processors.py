"""What every logits processor must do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsProcessorSpec, LogitsView, SamplingContext
from fwk.plugins import Registered
from fwk.types import SamplingParams
from fwk_kit.testing.fake_frontend import ByteText
from fwk_kit.testing.served import ServedSuite
from fwk_native.thread_pool import ThreadPool

VOCAB, SLOTS, EOS = 80, 32, 2
TEXTS: list[list[int]] = [[1, 5, 9, 5], [7], [3, 3, 3, 3, 3, 8], [11, 12, 13, 14, 15, 16, 17]]


def view_of(texts: Sequence[Sequence[int]], slots: Sequence[int]) -> LogitsView:
    """Rows of these texts, the first token of each its prompt; past a text's end lies another sequence's rubbish."""
    token_ids = np.full((SLOTS, 64), -7, np.int32)
    for slot, text in zip(slots, texts, strict=True):
        token_ids[slot, : len(text)] = text
    lengths = np.array([len(text) for text in texts])
    seeds = np.array(slots, np.uint64) * np.uint64(1_000_003)
    return LogitsView(np.array(slots), lengths, np.ones(len(texts), np.int64), token_ids, seeds)


class LogitsProcessorSuite(ServedSuite):
    """Rows that asked are edited by their own settings and text alone; the others stay to the bit.

    asks: settings of requests that ask something of the processor: fields of ``SamplingParams``, those of the
        declaration's ``params`` under ``extra``; at least one, better two that differ.
    """

    family = "logits_processors"
    interface = LogitsProcessor
    asks: ClassVar[Sequence[Mapping[str, Any]]] = ()

    def processor(self, item: Registered) -> LogitsProcessor:
        """One that has seen nothing."""
        host, options = torch.device("cpu"), self.given(item)
        context = SamplingContext(VOCAB, SLOTS, host, (EOS,), options, ThreadPool(), text=ByteText)
        return self.make(item, context)

    def settings(self) -> list[SamplingParams]:
        """The requests of ``asks``, or a skip."""
        if not self.asks:
            pytest.skip("the suite names no settings: set asks")
        return [SamplingParams(**fields) for fields in self.asks]

    def logits(self, count: int, seed: int = 0) -> Tensor:
        """Random scores."""
        return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))

    def alone(self, item: Registered, params: SamplingParams, text: Sequence[int], logits: Tensor) -> Tensor:
        """What a processor makes of one row."""
        processor = self.processor(item)
        assert processor.add(3, params) is True
        with torch.inference_mode():
            return processor.apply(logits[None].clone(), view_of([text], [3]))[0]

    def exercise(self, item: Registered) -> None:
        assert self.processor(item).add(0, SamplingParams()) is False

    def test_nobody_who_asks_nothing_takes_part(self, item: Registered) -> None:
        processor = self.processor(item)
        for params in (SamplingParams(), SamplingParams(max_tokens=5, seed=1)):
            assert processor.add(0, params) is False, "add() must say whether the request asks anything of it"

    def test_who_asks_gets_something_else(self, item: Registered) -> None:
        for params in self.settings():
            changed = False
            for seed, text in enumerate(TEXTS):
                logits = self.logits(1, seed)[0]
                out = self.alone(item, params, text, logits)
                assert out.shape == logits.shape
                assert out.dtype == torch.float32
                assert not out.isnan().any(), f"{params}: NaN"
                assert not (out == float("inf")).any(), f"{params}: +inf"
                assert out.isfinite().any(), f"{params}: no token is left"
                changed |= not torch.equal(out, logits)
            assert changed, f"{params} changes nothing"

    def test_a_row_depends_on_nobody_else(self, item: Registered) -> None:
        """Rows of several requests and of one that asks nothing, in any order: as alone, or untouched."""
        asked = self.settings()
        rows = [(asked[i % len(asked)], TEXTS[i % len(TEXTS)]) for i in range(2 * len(asked))]
        processor = self.processor(item)
        slots = [20 - i for i in range(len(rows))]
        for slot, (params, _) in zip(slots, rows, strict=True):
            assert processor.add(slot, params) is True
        assert processor.add(25, SamplingParams()) is False
        logits = self.logits(len(rows) + 1, 9)
        texts = [text for _, text in rows]
        for order in (list(range(len(rows) + 1)), [len(rows), *range(len(rows))][::-1]):
            view = view_of([[*texts, [4, 4]][i] for i in order], [[*slots, 25][i] for i in order])
            with torch.inference_mode():
                out = processor.apply(logits[order].clone(), view)
            for at, i in enumerate(order):
                if i == len(rows):
                    assert torch.equal(out[at], logits[i]), "a row that asked nothing was edited"
                else:
                    torch.testing.assert_close(out[at], self.alone(item, *rows[i], logits[i]))

    def test_who_reads_no_history_finds_none(self, item: Registered) -> None:
        """Where ``reads_history`` is False, the newest tokens may not have come yet: they change nothing."""
        params = self.settings()[0]
        if self.processor(item).reads_history:
            pytest.skip("it reads the history, and is given all of it: reads_history is True")
        for seed, text in enumerate(TEXTS):
            logits = self.logits(1, seed)[0]
            unknown = [text[0], *(0 for _ in text[1:])]
            assert torch.equal(self.alone(item, params, text, logits), self.alone(item, params, unknown, logits))

    def test_who_reads_no_places_does_the_same_in_all(self, item: Registered) -> None:
        """Where ``reads_places`` is False, neither the text nor its length changes anything."""
        params = self.settings()[0]
        if self.processor(item).reads_places:
            pytest.skip("it reads how many tokens there are, and is told: reads_places is True")
        assert not self.processor(item).reads_history
        logits = self.logits(1)[0]
        for text in TEXTS:
            assert torch.equal(self.alone(item, params, text, logits), self.alone(item, params, [1] * 40, logits))

    def test_rows_of_drafts_have_their_own_texts(self, item: Registered) -> None:
        """A sequence whose drafts are verified has several rows, each with more of its text."""
        params = self.settings()[0]
        processor, text = self.processor(item), TEXTS[-1]
        processor.add(5, params)
        logits = self.logits(3)
        view = view_of([text], [5])
        view.slots, view.num_prompt_tokens = np.array([5, 5, 5]), np.ones(3, np.int64)
        view.seeds = np.full(3, 5, np.uint64)
        view.num_tokens = np.array([len(text) - 2, len(text) - 1, len(text)])
        with torch.inference_mode():
            out = processor.apply(logits.clone(), view)
        for row in range(3):
            wanted = self.alone(item, params, text[: len(text) - 2 + row], logits[row])
            torch.testing.assert_close(out[row], wanted)

    def test_a_slot_is_used_again(self, item: Registered) -> None:
        """The next sequence of a slot gets nothing of the one before."""
        asked = self.settings()
        processor = self.processor(item)
        for params in [*asked, *reversed(asked)]:
            assert processor.add(3, params) is True
            logits = self.logits(1)
            with torch.inference_mode():
                out = processor.apply(logits.clone(), view_of([TEXTS[0]], [3]))
            torch.testing.assert_close(out[0], self.alone(item, params, TEXTS[0], logits[0]))
            processor.remove(3)
        assert processor.add(3, SamplingParams()) is False
        assert processor.add(4, asked[0]) is True
        logits = self.logits(2)
        with torch.inference_mode():
            out = processor.apply(logits.clone(), view_of([TEXTS[0]] * 2, [3, 4]))
        assert torch.equal(out[0], logits[0]), "a sequence that asks nothing got what the one before it had asked for"

    def test_two_workers_do_not_share(self, item: Registered) -> None:
        one, two = self.processor(item), self.processor(item)
        params = self.settings()[0]
        one.add(3, params)
        assert two.add(3, SamplingParams()) is False
        logits = self.logits(1)
        with torch.inference_mode():
            out = one.apply(logits.clone(), view_of([TEXTS[0]], [3]))
        torch.testing.assert_close(out[0], self.alone(item, params, TEXTS[0], logits[0]))

    def test_fields_of_requests_are_described(self, item: Registered) -> None:
        assert isinstance(item.declaration, LogitsProcessorSpec)
        for name, field in getattr(item.declaration.params, "model_fields", {}).items():
            assert not field.is_required(), f"the request field {name} has no default: every other request would fail"
