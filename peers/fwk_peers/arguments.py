"""Arguments of other servers: which work here, and a sentence for each that does not.

``tables`` holds the arguments of LightLLM's, llama.cpp's, RTP-LLM's, SGLang's, TGI's and vLLM's
pages as those type them. ``docs/migrating.md`` is made from them, and an unknown flag is looked up there.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from fwk_errors import ConfigError

TABLES = Path(__file__).with_name("tables")
VALUES = Path(__file__).with_name("values.toml")
TRUE, FALSE = frozenset(("true", "1", "yes", "on")), frozenset(("false", "0", "no", "off"))
"""Words of a switch."""
OURS = frozenset(("works", "differs"))
"""Kinds of arguments whose names are options here."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One of a server's arguments.

    value: an example of what it is given, of that server's page; empty: it is a switch.
    kind: ``works`` (accepted here, by this name or with it as another name of ours), ``so`` (what it asks for is always
    so), ``says`` (not needed or not taken), ``waits`` (for a plugin or hardware) or ``differs`` (accepted here, for
    something else). what: the reason, or what for.
    so: values by which one that is not taken asks for nothing that is not so. is_on: its server has it on unless told
    otherwise, so that who turns it off wants something.
    """

    product: str
    name: str
    value: str
    kind: str
    what: str = ""
    so: tuple[str, ...] = ()
    is_on: bool = False

    @property
    def is_switch(self) -> bool:
        return self.value.lower() in ("", "true", "false")

    def answer(self) -> str:
        """The sentence for one that does not work here."""
        if self.kind == "waits":
            return f"{self.name} ({self.product}) is known but not here yet: it waits for {self.what}"
        if self.kind == "so":
            return f"{self.name} ({self.product}) is true or false, and always true here: {self.what}"
        return f"{self.name} ({self.product}) is not needed or not taken here: {self.what}"

    def note(self, value: object) -> str | None:
        """What to tell who gives it a value by which nothing is asked for that is not so; None for other values."""
        word = str(value).lower()
        if self.kind == "so" and word in TRUE:
            return f"{self.name} ({self.product}) is so already: {self.what}"
        if self.kind == "so" and word in FALSE and not self.is_on:
            return f"{self.name} {value} ({self.product}) changes nothing: {self.what}"
        if value is None or (self.is_switch and word in FALSE and not self.is_on):
            return f"{self.name} {value} ({self.product}) is as if it were left out"
        return f"{self.name} {value} ({self.product}) is so already" if word in self.so else None


@dataclass(frozen=True, slots=True)
class Peer:
    """One server's arguments, as it writes them."""

    product: str
    arguments: tuple[Argument, ...]

    def of(self, kind: str) -> list[Argument]:
        return [argument for argument in self.arguments if argument.kind == kind]


@functools.cache
def peers() -> tuple[Peer, ...]:
    """Every server whose arguments are known, by name."""
    return tuple(_read(path) for path in sorted(TABLES.glob("*.toml")))


@functools.cache
def foreign(name: str) -> Argument | None:
    """Another server's argument that is no option here, by its name in any spelling; None when it is nobody's."""
    wanted = _plain(name)
    found = [a for peer in peers() for a in peer.arguments if a.kind not in OURS and _plain(a.name) == wanted]
    return next((argument for argument in found if argument.name == name), found[0] if found else None)


def note(name: str, value: object) -> str | None:
    """``Argument.note`` for a name in any spelling; None when it is nobody's."""
    argument = foreign(name)
    return argument.note(value) if argument is not None else None


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


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
    product = table["product"]

    def argument(typed: str, kind: str, what: str = "", so: tuple[str, ...] = (), is_on: bool = False) -> Argument:
        name, _, value = typed.partition(" ")
        return Argument(product, name, value, kind, what, so, is_on)

    found = [argument(typed, "works") for typed in table["works"]]
    for kind in ("so", "says", "waits", "differs"):
        for entry in table.get(kind, ()):
            so = tuple(entry.get("so", ()))
            is_on = entry.get("is_on", False)
            found += [argument(typed, kind, entry["what"], so, is_on) for typed in entry["arguments"]]
    return Peer(product, tuple(found))
