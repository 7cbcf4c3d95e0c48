"""The FlashInfer adapter over a stand-in for FlashInfer, and its declaration. On a GPU: tests/gpu."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from tests.helpers import fake_flashinfer

from fwk.errors import PluginError
from fwk.interfaces.attention import AttentionBackend, AttentionContext
from fwk.interfaces.declaration import Facts, Host
from fwk.plugins import Registered, choose, discover, find
from fwk_kit.testing import AttentionSuite
from fwk_kit.testing import attention_cases as contract
from fwk_kit.testing.attention_cases import DTYPES, STEPS, TREES, Cached, Shape, block_tables
from fwk_kit.testing.batches import make_batch

PLUGINS = discover()
FLASHINFER = find(PLUGINS, "attention", "flashinfer")
GPU = Host("cuda", (9, 0))


@pytest.fixture(autouse=True)
def over_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.delitem(sys.modules, "fwk_attention.flashinfer.backend", raising=False)
    from fwk_attention.flashinfer.backend import FlashInferBackend

    def build(registered: Registered, shape: Shape, features: frozenset[str] = frozenset()) -> AttentionBackend:
        dtype = DTYPES[shape.dtype]
        return FlashInferBackend(AttentionContext(torch.device("cpu"), dtype, shape.kv_dtype, shape.block_size))

    monkeypatch.setattr(contract, "build", build)
    fake_flashinfer.PLANS.clear()
    yield
    sys.modules.pop("fwk_attention.flashinfer.backend", None)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("window", [None, 1, 10])
def test_equals_the_reference(step: tuple[list[int], list[int]], window: int | None) -> None:
    contract.check(FLASHINFER, Shape(sliding_window=window, soft_cap=5.0 if window == 10 else None), *step)


@pytest.mark.parametrize("window", [None, 2, 6])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_trees(tree: tuple[list[int], list[list[int] | None]], window: int | None) -> None:
    pasts, parents = tree
    num_new = [25 if tree is None else len(tree) for tree in parents]
    contract.check(FLASHINFER, Shape(sliding_window=window), pasts, num_new, parents=parents)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_heads_and_blocks(block_size: int, dtype: str) -> None:
    contract.check(FLASHINFER, Shape(9, 3, 64, block_size, dtype=dtype), [20, 31, 0, 17], [1, 1, 18, 20])


def test_the_rest_of_the_contract() -> None:
    suite = AttentionSuite()
    suite.test_a_block_used_before_is_as_good_as_new(FLASHINFER)
    suite.test_writes_only_its_slots(FLASHINFER)
    suite.test_layers_of_different_kinds_share_a_step(FLASHINFER)
    suite.test_two_backends_do_not_disturb_each_other(FLASHINFER)
    suite.test_move_is_all_at_once(FLASHINFER, 1)
    suite.test_move_after_a_tree(FLASHINFER, "auto", 0)
    for own in (1, 40):
        suite.test_reads_blocks_filled_in_the_same_step(FLASHINFER, own)


def test_plans_once_a_step_for_each_kind_of_layer() -> None:
    cached = Cached(FLASHINFER, Shape(sliding_window=7), 8, num_layers=3)
    cached.layers[2] = Shape(soft_cap=3.0).layer(2)
    tables = block_tables([33, 16])
    batch = make_batch([32, 15], [1, 1], tables)
    cached.backend.plan(batch, cached.layers)
    windowed, capped = fake_flashinfer.PLANS
    assert [plan["wrapper"] for plan in (windowed, capped)] == ["BatchDecodeWithPagedKVCacheWrapper"] * 2
    assert windowed["indptr"].tolist() == [0, 3, 4]
    assert windowed["indices"].tolist() == [*tables[0], *tables[1]]
    assert windowed["last_page_len"].tolist() == [1, 16]
    assert (windowed["window_left"], windowed["logits_soft_cap"]) == (6, None)
    assert (capped["window_left"], capped["logits_soft_cap"]) == (-1, 3.0)
    assert windowed["sm_scale"] == pytest.approx(32**-0.5)
    assert windowed["use_tensor_cores"] is False
    prompt = make_batch([16, 0], [4, 1], tables)
    cached.backend.plan(prompt, cached.layers)
    plan = fake_flashinfer.PLANS[2]
    assert (plan["wrapper"], plan["causal"]) == ("BatchPrefillWithPagedKVCacheWrapper", True)
    assert plan["qo_indptr"].tolist() == [0, 4, 5]
    assert plan["last_page_len"].tolist() == [4, 1]
    tree = make_batch([16, 0], [4, 1], tables, parents=[[-1, 0, 0, 1], [-1]])
    cached.backend.plan(tree, cached.layers)
    windowed, capped = fake_flashinfer.PLANS[4:]
    assert (windowed["causal"], windowed["window_left"]) == (False, -1)
    assert len(windowed["custom_mask"]) == 4 * 20 + 1
    expected = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
    assert np.array_equal(capped["custom_mask"][:80].view(4, 20)[:, 16:].numpy(), expected)
    assert capped["custom_mask"][:80].view(4, 20)[:, :16].all()
    assert windowed["custom_mask"][:80].view(4, 20)[:, :16].sum(1).tolist() == [6, 5, 5, 4]


def test_a_plan_outlives_the_buffers_it_was_made_from() -> None:
    """The runner fills its input buffers anew for the next step."""
    cached = Cached(FLASHINFER, Shape(), 8)
    batch = make_batch([16], [4], block_tables([20]))
    cached.backend.plan(batch, cached.layers)
    batch.query_start_np[:] = 0
    batch.seq_lens_np[:] = 0
    (plan,) = fake_flashinfer.PLANS
    assert plan["qo_indptr"].tolist() == [0, 4]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (Facts(dtype="bfloat16", head_size=64), "needs a cuda device, this run uses cpu"),
        (Facts(host=GPU, dtype="float32"), "computes in float16, bfloat16, this run in float32"),
        (
            Facts(host=GPU, dtype="bfloat16", head_size=80),
            "has kernels for head sizes 64, 128, 256, this model's is 80",
        ),
        (Facts(host=GPU, dtype="bfloat16", kv_dtype="int8"), "keeps K/V as auto, not int8"),
        (Facts(host=GPU, dtype="bfloat16", features=frozenset({"latent"})), "lacks latent"),
        (Facts(host=Host("cuda", (7, 5)), dtype="float16"), "needs compute capability 8.0 or newer"),
        (Facts(host=GPU, dtype="float16", head_size=64), "needs the package flashinfer-python>=0.6: pip install"),
    ],
)
def test_is_refused_with_the_reason(facts: Facts, message: str) -> None:
    with pytest.raises(PluginError, match="attention backend 'flashinfer' .*" + message):
        choose(PLUGINS, "attention", "flashinfer", facts)
