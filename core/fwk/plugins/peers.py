"""Arguments of other servers: which work here, and a sentence for each that does not.

The tables next to this module hold every argument of LightLLM's, SGLang's and RTP-LLM's argument pages, and vLLM's most
used ones. ``docs/migrating.md`` is made from them, and an unknown flag is looked up there.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from fwk.errors import ConfigError

TABLES = Path(__file__).with_name("peers")
VALUES = Path(__file__).with_name("peer_values.toml")


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


@functools.cache
def _values() -> tuple[dict[str, dict[str, str]], dict[tuple[str, str], str]]:
    """By option: values and what they are called here. By option and value: what to write instead."""
    table = tomllib.loads(VALUES.read_text(encoding="utf-8"))
    says = {(entry["option"], value): entry["what"] for entry in table["says"] for value in entry["values"]}
    return table["means"], says


def valued(option: str) -> list[tuple[str, str]]:
    """Other servers' values of an option, each with our name for it or a sentence on what to write instead."""
    means, says = _values()
    return [*means.get(option, {}).items(), *((value, what) for (name, value), what in says.items() if name == option)]


def meant(option: str, value: str, given: str = "") -> str:
    """Our name for another server's value, or the value. Raises ``ConfigError`` with what to write instead.

    Case does not matter: vLLM writes some of them in capitals. given: the option it was given for, if not ``option``.
    """
    means, says = _values()
    said = says.get((option, value.lower()))
    if said is not None:
        raise ConfigError(f"--{(given or option).replace('_', '-')} {value}: {said}")
    return means.get(option, {}).get(value.lower(), value)


def _read(path: Path) -> Peer:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    said = {
        kind: {argument: entry["what"] for entry in table.get(kind, ()) for argument in entry["arguments"]}
        for kind in ("says", "waits")
    }
    return Peer(table["product"], tuple(table["works"]), said["says"], said["waits"])
