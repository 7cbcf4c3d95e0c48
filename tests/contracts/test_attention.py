"""Every attention backend does what the contract says, and layers no cache could hold are refused."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

from fwk.interfaces.attention import AttentionLayer, KVKind
from fwk.plugins import Registered
from fwk_kit.testing import AttentionSuite
from fwk_kit.testing.attention_cases import KV_DTYPES

CHANNELS = str(Path(__file__).parent / "heavy_channels.json")


@pytest.mark.gate(5)
class TestTorch(AttentionSuite):
    plugin = "torch"


@pytest.mark.gate(5)
class TestCpu(AttentionSuite):
    plugin = "cpu"


IN_SHORT = (
    *("test_what_is_not_declared_is_refused", "test_load_names_what_the_family_asks_for", "test_random_steps"),
    *("test_declaring_imports_nothing_heavy", "test_options_are_described_and_can_be_sent_to_another_process"),
    *("test_sliding_window", "test_soft_cap", "test_random_trees", "test_writes_only_its_slots", "test_quantised_kv"),
    *("test_latent", "test_move_after_a_tree"),
)
"""What the gate has of backends that are slow on a CPU."""


@pytest.mark.gate(1, only=(*IN_SHORT[:2], "test_sliding_window", "test_random_trees"))
class TestFlex(AttentionSuite):
    plugin = "flex"


@pytest.mark.gate(1, only=IN_SHORT)
class TestTriton(AttentionSuite):
    plugin = "triton"

    @pytest.mark.sweep
    def test_serves_a_tiny_model(self, item: Registered) -> None:
        super().test_serves_a_tiny_model(item)

    @pytest.mark.sweep
    @pytest.mark.usefixtures("same_rows")
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_bits_do_not_depend_on_chunks(self, item: Registered, kv_dtype: str, dtype: str) -> None:
        """Slow in Triton's interpreter; a short one is in tests/plugins/attention."""
        super().test_bits_do_not_depend_on_chunks(item, kv_dtype, dtype)


@pytest.mark.gate(2)
class TestDoubleSparsity(AttentionSuite):
    """In full below its threshold; what it leaves out beyond: tests/plugins/attention."""

    plugin = "double_sparsity"
    options = {"ds_channel_config_path": CHANNELS, "ds_heavy_channel_num": 8}

    @classmethod
    def registered(cls) -> Registered:
        """The plugin, with the options as its defaults: numbers are looked at in many shapes without any."""
        found = super().registered()
        assert found.declaration.options is not None
        model = found.declaration.options
        own = {name: copy(model.model_fields[name]) for name in cls.options}
        for name, field in own.items():
            field.default = cls.options[name]
        fields: dict[str, Any] = {name: (field.annotation, field) for name, field in own.items()}
        options = create_model("Defaults", __base__=model, **fields)
        return replace(found, declaration=replace(found.declaration, options=options))


@pytest.mark.gate(1)
class TestDoubleSparsityOfAllTokens(TestDoubleSparsity):
    """By the heaviest tokens at any length, which are all of them."""

    options = {**TestDoubleSparsity.options, "ds_sparse_decode_threshold": 0, "ds_heavy_token_num": 10_000}


@pytest.mark.gate(1)
class TestFA3(AttentionSuite):
    """On a machine without a GPU only its declaration; its numbers over stand-ins: tests/plugins/attention."""

    plugin = "fa3"


@pytest.mark.gate(1)
class TestFlashInfer(AttentionSuite):
    """On a machine without a GPU only its declaration; its numbers over a stand-in: tests/plugins/attention."""

    plugin = "flashinfer"


def test_layers_refuse_what_no_cache_holds() -> None:
    with pytest.raises(ValueError, match="one KV head"):
        AttentionLayer(0, 4, 2, 32, 1.0, value_head_size=16, kind=KVKind.LATENT)
    with pytest.raises(ValueError, match="differ in size only in a latent layer"):
        AttentionLayer(0, 4, 2, 32, 1.0, value_head_size=16)
