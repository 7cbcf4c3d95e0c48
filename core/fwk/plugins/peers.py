"""Arguments of other servers: which work here, and a sentence for each that does not.

The tables next to this module hold every argument of LightLLM's, SGLang's and RTP-LLM's argument pages, and vLLM's most
used ones. ``docs/migrating.md`` is made from them, and an unknown flag is looked up there.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).with_name("peers")


@dataclass(frozen=True, slots=True)
class Peer:
    """One server's arguments, as it writes them.

    works: accepted here, by this name or with it as another name of ours. says and waits: what a user is told of each
    that is not: why none is needed, or which plugin or hardware it waits for.
    """

    product: str
    works: tuple[str, ...]
    says: dict[str, str]
    waits: dict[str, str]

    def answer(self, argument: str) -> str | None:
        """The sentence for an argument that does not work here; None for those that do, or are not known."""
        if argument in self.says:
            return f"{argument} ({self.product}) is not needed or not taken here: {self.says[argument]}"
        if argument in self.waits:
            return f"{argument} ({self.product}) is known but not here yet: it waits for {self.waits[argument]}"
        return None


@functools.cache
def peers() -> tuple[Peer, ...]:
    """Every server whose arguments are known, by name."""
    return tuple(_read(path) for path in sorted(TABLES.glob("*.toml")))


def answer(name: str) -> str | None:
    """What to tell a user who gives another server's argument, in any spelling; None when it is nobody's."""
    wanted = name.lstrip("-").replace("_", "-")
    for peer in peers():
        for argument in (*peer.says, *peer.waits):
            if argument.lstrip("-").replace("_", "-") == wanted:
                return peer.answer(argument)
    return None


def _read(path: Path) -> Peer:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    said = {
        kind: {argument: entry["what"] for entry in table.get(kind, ()) for argument in entry["arguments"]}
        for kind in ("says", "waits")
    }
    return Peer(table["product"], tuple(table["works"]), said["says"], said["waits"])
