"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fwk.testing import FeatureSuite


class TestMine(FeatureSuite):
    plugin = "mine"
    request: ClassVar[Mapping[str, Any]] = {"mine_entropy": True}
