"""The contract of the family, run by the package's tests and by ``fwk plugins test fwk-pii``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fwk.testing import FeatureSuite


class TestPii(FeatureSuite):
    plugin = "pii"
    options: ClassVar[Mapping[str, Any]] = {"enable_pii_redaction": True, "pii_sides": "prompts"}
    """Of replies it leaves token ids out, which the contract compares."""
