"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from fwk.testing import KVTransferSuite


class TestMine(KVTransferSuite):
    plugin = "mine"
    served_request = {"prompt": "Hello " * 20, "max_tokens": 8}
