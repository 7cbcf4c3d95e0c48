"""Masks of grammars on a CPU, and how their backend begins, apart from any grammar."""

from __future__ import annotations

import logging
import threading

import pytest

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar
from fwk.types import GrammarRequest
from fwk.worker.grammar import GrammarStore


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
