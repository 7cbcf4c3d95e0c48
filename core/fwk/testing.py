"""Public name of the kit for plugin authors: the contract suites of every family, and what plugin tests share.

The kit is the package ``fwk_kit`` of this distribution. This module is core's only import of it, and nothing in core
imports this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fwk_kit import testing as _kit

if TYPE_CHECKING:
    from fwk_kit.testing import *  # noqa: F403

__all__ = _kit.__all__  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    return getattr(_kit, name)
