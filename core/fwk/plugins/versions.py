"""What a version of a family's interface is, and the adapters that make older plugins fit.

The newest version of each family is in its row of ``fwk.plugins.families``. The promise made to authors, and how a
version is retired, is in ``docs/plugins/stability.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fwk.interfaces.declaration import Declaration
from fwk.interfaces.quant import PLAIN, QuantizerSpec


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Adapter:
    """Makes a plugin of one older version of a family fit the newest.

    retires: the release of fwk that refuses this version.
    declaration: an old declaration to the one its author would write today; it imports nothing heavy.
    wrap: the class that ``load`` names to one with today's interface.
    """

    retires: str
    declaration: Callable[[Any], Declaration] = _unchanged
    wrap: Callable[[Any], Any] = _unchanged


@dataclass(frozen=True, slots=True)
class ApiVersion:
    """The versions of one family that this fwk takes: ``newest``, and those it has an adapter for."""

    newest: int = 1
    adapters: Mapping[int, Adapter] = field(default_factory=dict[int, Adapter])

    def refusal(self, family: str, name: str, package: str, api: int) -> str | None:
        """Why a declaration written for version ``api`` cannot be taken, and the remedy; None when it can."""
        if api == self.newest or api in self.adapters:
            return None
        words = f"{name!r} was written for version {api} of the {family} interface"
        if api > self.newest:
            return f"{words}, this fwk has version {self.newest}: upgrade fwk, or install an older {package}"
        oldest = min((self.newest, *self.adapters))
        return f"{words}, the oldest this fwk takes is {oldest}: install a newer {package}"

    def adapt(self, declaration: Declaration) -> tuple[Declaration, Adapter | None]:
        """The declaration as of the newest version, and the adapter that its object needs too."""
        adapter = self.adapters.get(declaration.api)
        if adapter is None:
            return declaration, None
        return replace(adapter.declaration(declaration), api=self.newest), adapter


def quant_1(old: QuantizerSpec) -> QuantizerSpec:
    """Version 1 said in two switches what version 2 says by layout: whose numbers stay those of the checkpoint."""
    exact = tuple(layout for layout in old.layouts if (old.keeps_plain if layout == PLAIN else old.is_lossless))
    return replace(old, api=2, is_lossless=False, keeps_plain=False, exact=exact)
