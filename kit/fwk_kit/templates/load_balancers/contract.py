"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from fwk.testing import LoadBalancerSuite


class TestMine(LoadBalancerSuite):
    plugin = "mine"
    serve_with = {"data_parallel_size": 2}
    served_request = {"prompt": "Hello", "max_tokens": 8}
