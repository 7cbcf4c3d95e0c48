"""The server's helper process, from its side: what may turn out endless or huge is tried there first."""

from __future__ import annotations

from typing import Any

import msgspec

from fwk.config import Config
from fwk.config.wire import to_plain
from fwk.process.helper import Helper
from fwk.types import GrammarRequest

MAX_GRAMMAR_BYTES = 48 * 2**20
"""What compiling a grammar may allocate, as the engine keeps it."""


class GrammarJob(msgspec.Struct, frozen=True):
    """A grammar and the backend that is to compile it."""

    backend: str
    request: GrammarRequest


class HelperSetup(msgspec.Struct, frozen=True):
    """What the server settled on."""

    config: dict[str, Any]


def new_helper(config: Config) -> Helper:
    """Not started yet."""
    return Helper("fwk.server.helper_process", HelperSetup(to_plain(config)))


def vet_grammar(helper: Helper, cpu_seconds: float, backend: str, request: GrammarRequest) -> None:
    """Have the helper compile a grammar. Raises ``InvalidRequest`` if it cannot, or not within the limits."""
    body = msgspec.msgpack.encode(GrammarJob(backend, request))
    helper.call("grammar", body, cpu_seconds=cpu_seconds, max_bytes=MAX_GRAMMAR_BYTES, what="compiling the grammar")
