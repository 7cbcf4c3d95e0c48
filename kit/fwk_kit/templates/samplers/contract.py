"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from fwk.testing import SamplerSuite


class TestMine(SamplerSuite):
    plugin = "mine"
    served_request = {"prompt": "Hello", "max_tokens": 8}
