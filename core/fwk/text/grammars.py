"""The grammar backend of one process: settled on at start-up, built beside the rest of the start."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarBackendSpec, GrammarContext
from fwk.plugins import PluginFactory, Registered, find, load_object
from fwk.text.model_text import ModelText
from fwk.types import GrammarRequest

NUM_REMEMBERED = 256
"""Grammars known to be right, so that a client that sends one with every request pays for it once."""


class Grammars:
    """Compiles the grammars of requests, and refuses what cannot be compiled. Safe to use from any thread.

    Without a backend until ``use`` names one.
    """

    def __init__(
        self,
        factory: PluginFactory,
        text: Callable[[], ModelText],
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._factory = factory
        self._text = text
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._right: dict[GrammarRequest, None] = {}
        self._item: Registered | None = None

    def use(self, name: str) -> None:
        """Compile with the backend that was settled on, or ``none``. Raises ``PluginLoadError`` if it is broken."""
        item = None if name == "none" else find(self._factory.plugins, "grammar", name)
        if item is not None:
            load_object(item)  # a broken one is found out now
        if item is not self._item:
            with self._lock:
                self._item, self._backend = item, None

    @property
    def name(self) -> str:
        """The chosen backend's name, or ``none``."""
        return self._item.name if self._item is not None else "none"

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of grammars that can be asked for."""
        if self._item is None:
            return frozenset()
        assert isinstance(self._item.declaration, GrammarBackendSpec)
        return self._item.declaration.kinds

    def compile(self, request: GrammarRequest) -> Grammar:
        """The state before the first token. Raises ``InvalidRequest`` when there is none, or no backend for it."""
        if self._item is None:
            raise InvalidRequest(
                "this server has no grammar backend, so it cannot constrain output: "
                "install one, or start it without --grammar-backend none",
                "grammar",
            )
        if request.kind not in self.kinds:
            raise InvalidRequest(
                f"the grammar backend '{self.name}' does not do {request.kind!r}, only {', '.join(sorted(self.kinds))}",
                "grammar",
            )
        try:
            return self._built().compile(request)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), "grammar") from None

    def check(self, request: GrammarRequest | None) -> None:
        """Raise ``InvalidRequest`` for a grammar that ``compile`` would refuse. May take as long as compiling it."""
        if request is None or request in self._right:
            return
        self.compile(request)
        with self._lock:
            self._right[request] = None
            while len(self._right) > NUM_REMEMBERED:
                del self._right[next(iter(self._right))]

    def build(self) -> None:
        """Build the backend, which takes tenths of a second, before a first request has to wait for it."""
        if self._item is not None:
            self._built()

    def _built(self) -> GrammarBackend:
        with self._lock:
            if self._backend is None:
                self._backend = self._build()
            return self._backend

    def _build(self) -> GrammarBackend:
        assert self._item is not None
        text = self._text()
        return self._factory.build(
            self._item,
            GrammarContext,
            tokenizer=text.tokenizer,
            token_bytes=text.vocabulary.all_bytes(self._vocab_size),
            special_ids=text.vocabulary.special_ids,
            eos_token_ids=self._eos_token_ids,
        )
