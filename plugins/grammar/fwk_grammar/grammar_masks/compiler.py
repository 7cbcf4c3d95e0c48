"""The grammar backend of one process: settled on at start-up, built alongside the rest of the start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import TextTools
from fwk.interfaces.feature import Plugins
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarBackendSpec, GrammarContext
from fwk.types import GrammarRequest


class GrammarCompiler:
    """Compiles the grammars of requests, and refuses what cannot be compiled. Safe to use from any thread.

    Without a backend until ``use`` names one. text: the served model's; it may take a second when it is first called.
    """

    def __init__(
        self, plugins: Plugins, text: Callable[[], TextTools], vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._plugins = plugins
        self._text = text
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._item: Any = None
        self._backend: GrammarBackend | None = None

    def use(self, name: str) -> bool:
        """Compile with the backend that was settled on. Returns whether it is another than before.

        Raises ``PluginLoadError`` if it is broken.
        """
        item = self._plugins.find("grammar", name)
        self._plugins.load(item)  # a broken one is found out now
        with self._lock:
            is_new = item is not self._item
            if is_new:
                self._item, self._backend = item, None
        return is_new

    @property
    def name(self) -> str:
        """The backend's name; empty without one."""
        return "" if self._item is None else self._item.name

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of grammars that can be asked for."""
        return frozenset() if self._item is None else cast("GrammarBackendSpec", self._item.declaration).kinds

    def check_kind(self, request: GrammarRequest) -> None:
        """Raise ``InvalidRequest`` for a kind that the backend does not do."""
        if request.kind not in self.kinds:
            raise InvalidRequest(
                f"the grammar backend '{self.name}' does not do {request.kind!r}, only {', '.join(sorted(self.kinds))}",
                "grammar",
            )

    def compile(self, request: GrammarRequest) -> Grammar:
        """The state before the first token. Raises ``InvalidRequest`` for the field ``grammar`` when there is none."""
        self.check_kind(request)
        try:
            return self._built().compile(request)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), "grammar") from None

    def build(self) -> None:
        """Build the backend, which takes tenths of a second, before a first request has to wait for it."""
        self._built()

    def _built(self) -> GrammarBackend:
        with self._lock:
            if self._backend is None:
                self._backend = self._build()
            return self._backend

    def _build(self) -> GrammarBackend:
        text = self._text()
        return self._plugins.build(
            self._item,
            GrammarContext,
            tokenizer=text.tokenizer,
            token_bytes=text.all_bytes(self._vocab_size),
            special_ids=text.special_ids,
            eos_token_ids=self._eos_token_ids,
        )
