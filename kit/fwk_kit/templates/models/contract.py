"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from fwk.testing import TINY, ModelSuite


class TestMine(ModelSuite):
    plugin = "mine"
    config = {**TINY, "architectures": ["MineForCausalLM"]}
    reference_config = {"architectures": ["LlamaForCausalLM"]}
    served_request = {"prompt": "Hello", "max_tokens": 8}
