"""Masks of grammars on a CPU, and how their backend begins, apart from any grammar."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fwk.errors import BlameSequence, FwkError, InvalidRequest
from fwk.interfaces.grammar import Grammar
from fwk.interfaces.sampling import SamplingContext
from fwk.types import GrammarRequest, SamplingParams
from fwk.worker.runner.sequence_table import SequenceTable
from fwk_grammar.grammar_masks.masks import CompiledGrammars, GrammarMasks


def test_a_backend_is_built_while_others_go_on() -> None:
    is_loaded = threading.Event()
    built: list[str] = []

    def build() -> None:
        assert is_loaded.wait(20)
        built.append(threading.current_thread().name)

    store = CompiledGrammars(_never)
    building = store.begin(build)
    is_loaded.set()  # ``begin`` has returned although nothing is built
    building.result(20)
    store.close()
    assert [name.startswith("fwk-grammar") for name in built] == [True]


def test_a_backend_that_cannot_be_built_is_told_and_the_model_served(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> None:
        raise RuntimeError("no such vocabulary")

    store = CompiledGrammars(_never)
    with caplog.at_level(logging.WARNING):
        store.begin(build).result(20)
    assert "no request can be constrained by a grammar: RuntimeError: no such vocabulary" in caplog.text
    with pytest.raises(InvalidRequest, match="never"):
        store.take(GrammarRequest("regex", "a"))
    store.close()


def _never(request: GrammarRequest) -> Grammar:
    raise InvalidRequest("never")


EOS = 7


class Written(Grammar):
    """One text, in tokens below ``EOS``; it cannot continue at token 6."""

    def __init__(self, tokens: list[int]) -> None:
        self._left = tokens

    def fill_mask(self, row: np.ndarray) -> None:
        row[:] = sum(1 << token for token in self._left[:1]) or 1 << EOS

    def accept(self, token_id: int) -> bool:
        if token_id == 6:
            raise FwkError("too complex")
        if token_id != (self._left[0] if self._left else EOS):
            return False
        self._left = self._left[1:]
        return True

    def rollback(self, num_tokens: int) -> None:
        raise AssertionError("nothing is a draft here")

    def fork(self) -> Written:
        return type(self)(self._left)

    @property
    def is_finished(self) -> bool:
        return self._left == [5]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_outputs_end_together_as_they_do_one_by_one(ignore_eos: bool) -> None:
    """Of eight sequences some continue, end, are complete already, and go wrong in three ways."""
    texts = [[1, 2, 3], [1, 5], [5], [1, 2], [1, 2], [], [], [1, 2, 3]]
    picked = [1, 1, 4, 3, 6, EOS, 2, 1]

    def told(together: bool) -> list[str]:
        store = CompiledGrammars(lambda request: Written(texts[int(request.source)]))
        context = SamplingContext(EOS + 1, len(texts), torch.device("cpu"), (EOS,))
        masks = GrammarMasks(context, store, SequenceTable(len(texts), 16, 16), lambda *_: None)
        for slot in range(len(texts)):
            params = SamplingParams(grammar=GrammarRequest("regex", str(slot)), ignore_eos=ignore_eos)
            assert masks.add(slot, params)
        found = []
        for tokens in (picked, [2] * len(texts)):  # the second time after what the first did
            ended: dict[int, int | Exception | None] = {}
            if together:
                ended |= masks.ends_each(list(range(len(texts))), tokens)
            else:
                for slot, token in enumerate(tokens):
                    try:
                        ended[slot] = masks.ends(slot, [token])
                    except BlameSequence as error:
                        ended[slot] = error
            found += [f"{slot}: {ended.get(slot)!s} {type(ended.get(slot))}" for slot in range(len(texts))]
        store.close()
        return found

    assert told(together=True) == told(together=False)
    assert len({line.partition(": ")[2] for line in told(together=True)}) >= 4


@pytest.mark.parametrize("told", [None, [True], OSError("broken")])
def test_a_backend_that_fails_for_all_its_grammars_is_told_for_each_of_them(told: object) -> None:
    """And for those of no other backend."""

    class Broken(Written):
        @classmethod
        def accept_each(cls, grammars: Sequence[Grammar], token_ids: Sequence[int]) -> list[bool | Exception]:
            if isinstance(told, Exception):
                raise told
            return told  # pyright: ignore[reportReturnType]

    store = CompiledGrammars(lambda request: (Broken if request.source == "broken" else Written)([1, 2]))
    context = SamplingContext(EOS + 1, 3, torch.device("cpu"), (EOS,))
    masks = GrammarMasks(context, store, SequenceTable(3, 16, 16), lambda *_: None)
    for slot, source in enumerate(["broken", "sound", "broken"]):
        assert masks.add(slot, SamplingParams(grammar=GrammarRequest("regex", source)))
    ended = masks.ends_each([0, 1, 2], [1, 1, 1])
    store.close()
    assert {slot: str(error).split(":")[0] for slot, error in ended.items()} == {
        slot: "the grammar cannot continue" for slot in (0, 2)
    }
