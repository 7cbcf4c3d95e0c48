"""The grammar backend of one process: settled on at start-up, built alongside the rest of the start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarBackendSpec, GrammarContext
from fwk.plugins import PluginFactory, Registered, find, load_object
from fwk.text.model_text import ModelText
from fwk.types import GrammarRequest

T = TypeVar("T")

NUM_REMEMBERED = 256
MAX_REMEMBERED_BYTES = 8 * 2**20
"""Grammars known to be right, so that a client that sends one with every request pays for it once; and the bytes of
their sources."""

MAX_WRONG = 64
"""Grammars remembered that the backend refuses."""


class Grammars:
    """Compiles the grammars of requests, and refuses what cannot be compiled. Safe to use from any thread.

    Without a backend until ``use`` names one. ``vet``, given a backend's name, checks grammars elsewhere (in a process
    that can be killed); without it, ``check`` compiles them here.
    """

    def __init__(
        self,
        factory: PluginFactory,
        text: Callable[[], ModelText],
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        vet: Callable[[str, GrammarRequest], None] | None = None,
    ) -> None:
        self._factory = factory
        self._text = text
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._right: dict[GrammarRequest, None] = {}
        self._num_bytes = 0  # of the sources in it
        self._wrong: dict[GrammarRequest, None] = {}
        self._item: Registered | None = None
        self._vet = vet

    def use(self, name: str) -> None:
        """Compile with the backend that was settled on, or ``none``. Raises ``PluginLoadError`` if it is broken."""
        item = None if name == "none" else find(self._factory.plugins, "grammar", name)
        if item is not None:
            load_object(item)  # a broken one is found out now
        if item is not self._item:
            with self._lock:
                self._item, self._backend = item, None
                self._wrong.clear()

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

    def is_known(self, request: GrammarRequest) -> bool:
        """Whether ``check`` has found it right already."""
        return request in self._right

    def compile(self, request: GrammarRequest) -> Grammar:
        """The state before the first token. Raises ``InvalidRequest`` when there is none, or no backend for it."""
        self._check_kind(request)
        return self._blaming_grammar(lambda: self._built().compile(request))

    def check(self, request: GrammarRequest | None) -> None:
        """Raise ``InvalidRequest`` for a grammar that ``compile`` would refuse. May take as long as compiling it."""
        if request is None or request in self._right:
            return
        self._check_kind(request)
        if self._vet is None:
            self._blaming_grammar(lambda: self._built().compile(request))
        else:
            vet = self._vet
            self._blaming_grammar(lambda: vet(self.name, request))
        with self._lock:
            if request not in self._right:
                self._right[request] = None
                self._num_bytes += len(request.source)
            while len(self._right) > NUM_REMEMBERED or self._num_bytes > MAX_REMEMBERED_BYTES:
                oldest = next(iter(self._right))
                del self._right[oldest]
                self._num_bytes -= len(oldest.source)

    def takes(self, request: GrammarRequest) -> bool:
        """Whether ``check`` lets a grammar of the server's own making through; remembered, for it is asked often."""
        if request in self._wrong:
            return False
        try:
            self.check(request)
        except InvalidRequest:
            with self._lock:
                self._wrong[request] = None
                if len(self._wrong) > MAX_WRONG:
                    del self._wrong[next(iter(self._wrong))]
            return False
        return True

    def _check_kind(self, request: GrammarRequest) -> None:
        if self._item is None:
            raise InvalidRequest(
                "this server has no grammar backend, so it cannot constrain output: "
                "install one, and the feature that masks by it, or start it without --grammar-backend none",
                "grammar",
            )
        if request.kind not in self.kinds:
            raise InvalidRequest(
                f"the grammar backend '{self.name}' does not do {request.kind!r}, only {', '.join(sorted(self.kinds))}",
                "grammar",
            )

    @staticmethod
    def _blaming_grammar(action: Callable[[], T]) -> T:
        try:
            return action()
        except InvalidRequest as error:
            raise InvalidRequest(str(error), "grammar") from None

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
