"""Every weight format does what the contract says. Layouts of checkpoints: tests/plugins/quant."""

from __future__ import annotations

from fwk_kit.testing import QuantizerSuite


class TestNone(QuantizerSuite):
    plugin = "none"


class TestInt8(QuantizerSuite):
    plugin = "int8"
    max_error = 0.012


class TestFp8(QuantizerSuite):
    plugin = "fp8"
    max_error = 0.04


class TestFp4(QuantizerSuite):
    plugin = "fp4"
    max_error = 0.13


class TestInt4(QuantizerSuite):
    plugin = "int4"
    max_error = 0.13


class TestBitsandbytes(QuantizerSuite):
    """In NF4. The others, and its checkpoints: tests/plugins/quant/test_bitsandbytes.py."""

    plugin = "bitsandbytes"
    max_error = 0.13


class TestGguf(QuantizerSuite):
    plugin = "gguf"


class TestTorchao(QuantizerSuite):
    """int8wo. The others: tests/plugins/quant/test_torchao.py."""

    plugin = "torchao"
    max_error = 0.012
