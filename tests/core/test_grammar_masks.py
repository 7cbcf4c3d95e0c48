"""Masks of grammars on a CPU, and how their backend begins, apart from any grammar."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar
from fwk.types import GrammarRequest
from fwk.worker.grammar import GrammarStore, forbid


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000, 4096])
@pytest.mark.parametrize("mixed", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("rest", [0, -1])
def test_what_a_mask_forbids_is_minus_infinity_and_nothing_else(vocab_size: int, mixed: float, rest: int) -> None:
    rng = np.random.default_rng(vocab_size)
    words = rng.integers(-(2**31), 2**31, (5, -(-vocab_size // 32))).astype(np.int32)
    words[rng.random(words.shape) >= mixed] = rest
    words[0, 0] = 2**31 - 1
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size), np.float32))
    wanted = logits.clone()
    for row, token_id in np.ndindex(5, vocab_size):
        if not int(words[row, token_id // 32]) >> token_id % 32 & 1:
            wanted[row, token_id] = -torch.inf
    forbid(logits, words)
    assert torch.equal(logits, wanted)


def test_a_backend_is_built_while_others_go_on() -> None:
    is_loaded = threading.Event()
    built: list[str] = []

    def build() -> None:
        assert is_loaded.wait(20)
        built.append(threading.current_thread().name)

    store = GrammarStore(_never)
    building = store.begin(build)
    is_loaded.set()  # ``begin`` has returned although nothing is built
    building.result(20)
    store.close()
    assert [name.startswith("fwk-grammar") for name in built] == [True]


def test_a_backend_that_cannot_be_built_is_told_and_the_model_served(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> None:
        raise RuntimeError("no such vocabulary")

    store = GrammarStore(_never)
    with caplog.at_level(logging.WARNING):
        store.begin(build).result(20)
    assert "no request can be constrained by a grammar: RuntimeError: no such vocabulary" in caplog.text
    with pytest.raises(InvalidRequest, match="never"):
        store.take(GrammarRequest("regex", "a"))
    store.close()


def _never(request: GrammarRequest) -> Grammar:
    raise InvalidRequest("never")
