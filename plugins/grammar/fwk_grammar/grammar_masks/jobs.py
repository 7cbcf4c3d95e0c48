"""The part that compiles a grammar for the first time, in a process that can be killed."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from fwk.interfaces.feature import JobPart, JobPartContext
from fwk.types import GrammarRequest
from fwk_grammar.grammar_masks.compiler import GrammarCompiler

MAX_BYTES = 48 * 2**20
"""What compiling a grammar may allocate, as the engine keeps it."""


class GrammarJob(msgspec.Struct, frozen=True):
    """A grammar and the backend that is to compile it; without a grammar the backend is built, for those to come."""

    backend: str
    request: GrammarRequest | None


_decode = msgspec.msgpack.Decoder(GrammarJob).decode


class GrammarJobs(JobPart):
    """Compiles what it is given; the grammar itself is dropped."""

    is_urgent: ClassVar[bool] = True

    def __init__(self, context: JobPartContext) -> None:
        self._compiler = GrammarCompiler(
            context.plugins, lambda: context.text, context.config.vocab_size, context.eos_token_ids
        )

    def prepare(self, body: bytes) -> None:
        """Build the backend, once."""
        self._compiler.use(_decode(body).backend)
        self._compiler.build()

    def run(self, body: bytes) -> bytes:
        request = _decode(body).request
        if request is not None:
            self._compiler.compile(request)
        return b""
