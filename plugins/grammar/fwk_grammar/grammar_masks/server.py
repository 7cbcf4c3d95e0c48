"""The part in the server: a grammar that cannot be compiled is refused before anything is queued."""

from __future__ import annotations

import threading

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.feature import ServerPart, ServerPartContext
from fwk.interfaces.grammar import GrammarChecker
from fwk.types import GrammarRequest
from fwk_grammar.grammar_masks import GrammarMasksOptions
from fwk_grammar.grammar_masks.compiler import GrammarCompiler
from fwk_grammar.grammar_masks.jobs import MAX_BYTES, GrammarJob

NUM_REMEMBERED = 256
MAX_REMEMBERED_BYTES = 8 * 2**20
"""Grammars known to be right, so that a client that sends one with every request pays for it once; and the bytes of
their sources."""

MAX_WRONG = 64
"""Grammars remembered that the backend refuses."""


class GrammarRequests(ServerPart, GrammarChecker):
    """Has grammars compiled once where that may turn out endless, and remembers which are right."""

    def __init__(self, context: ServerPartContext) -> None:
        super().__init__(context)
        options: GrammarMasksOptions = context.options
        self._cpu_seconds = options.grammar_timeout
        assert context.plugins is not None
        self._backend = GrammarCompiler(context.plugins, lambda: context.text, 0, ())  # for its name: it builds none
        self._lock = threading.Lock()
        self._right: dict[GrammarRequest, None] = {}
        self._num_bytes = 0  # of the sources in it
        self._wrong: dict[GrammarRequest, None] = {}
        if context.frontend is not None:
            context.frontend.grammar_in_reasoning = options.grammar_in_reasoning

    def use_backend(self, name: str) -> frozenset[str]:
        if self._backend.use(name):
            with self._lock:
                self._wrong.clear()
        return self._backend.kinds

    def first_pause(self) -> None:
        """Have the backend built that compiles the first grammar."""
        if self._backend.name and self.context.task == "generate":
            self.context.jobs.warm_up(msgspec.msgpack.encode(GrammarJob(self._backend.name, None)))

    def is_known(self, request: GrammarRequest) -> bool:
        return request in self._right

    def check_grammar(self, request: GrammarRequest) -> None:
        if request in self._right:
            return
        self._backend.check_kind(request)
        body = msgspec.msgpack.encode(GrammarJob(self._backend.name, request))
        try:
            self.context.jobs.run(
                body, "compiling the grammar", cpu_seconds=self._cpu_seconds, max_bytes=MAX_BYTES, is_bounded=False
            )
        except InvalidRequest as error:
            raise InvalidRequest(str(error), "grammar") from None
        with self._lock:
            if request not in self._right:
                self._right[request] = None
                self._num_bytes += len(request.source)
            while len(self._right) > NUM_REMEMBERED or self._num_bytes > MAX_REMEMBERED_BYTES:
                oldest = next(iter(self._right))
                del self._right[oldest]
                self._num_bytes -= len(oldest.source)

    def takes_grammar(self, request: GrammarRequest) -> bool:
        if request in self._wrong:
            return False
        try:
            self.check_grammar(request)
        except InvalidRequest:
            with self._lock:
                self._wrong[request] = None
                if len(self._wrong) > MAX_WRONG:
                    del self._wrong[next(iter(self._wrong))]
            return False
        return True
