"""The FlashInfer adapter over a stand-in for FlashInfer, and its declaration. On a GPU: tests/gpu."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import fake_flashinfer

from fwk.errors import ConfigError, PluginError
from fwk.interfaces.attention import AttentionBackend, AttentionContext
from fwk.interfaces.declaration import Facts, Host, Needs
from fwk.plugins import Registered, choose, find
from fwk_attention.flashinfer import FlashInferOptions
from fwk_kit.testing import AttentionSuite
from fwk_kit.testing import attention_cases as contract
from fwk_kit.testing.attention_cases import DTYPES, STEPS, TREES, Cached, Shape, block_tables
from fwk_kit.testing.base import installed
from fwk_kit.testing.batches import make_batch

PLUGINS = installed()
FLASHINFER = find(PLUGINS, "attention", "flashinfer")
GPU = Host("cuda", (9, 0))


@pytest.fixture(autouse=True)
def over_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    for name in ("backend", "wrappers"):
        monkeypatch.delitem(sys.modules, f"fwk_attention.flashinfer.{name}", raising=False)
    from fwk_attention.flashinfer.backend import FlashInferBackend

    def build(
        registered: Registered, shape: Shape, features: frozenset[str] = frozenset(), *, is_deterministic: bool = False
    ) -> AttentionBackend:
        dtype = DTYPES[shape.dtype]
        context = AttentionContext(torch.device("cpu"), dtype, shape.kv_dtype, shape.block_size, FlashInferOptions())
        return FlashInferBackend(context)

    monkeypatch.setattr(contract, "build", build)
    fake_flashinfer.PLANS.clear()
    fake_flashinfer.MADE.clear()
    yield
    for name in ("backend", "wrappers"):
        sys.modules.pop(f"fwk_attention.flashinfer.{name}", None)


@pytest.mark.gate(4)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("window", [None, 1, 10])
def test_equals_the_reference(step: tuple[list[int], list[int]], window: int | None) -> None:
    contract.check(FLASHINFER, Shape(sliding_window=window, soft_cap=5.0 if window == 10 else None), *step)


@pytest.mark.gate(2)
@pytest.mark.parametrize("window", [None, 2, 6])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_trees(tree: tuple[list[int], list[list[int] | None]], window: int | None) -> None:
    pasts, parents = tree
    num_new = [25 if tree is None else len(tree) for tree in parents]
    contract.check(FLASHINFER, Shape(sliding_window=window), pasts, num_new, parents=parents)


@pytest.mark.gate(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_heads_and_blocks(block_size: int, dtype: str) -> None:
    contract.check(FLASHINFER, Shape(9, 3, 64, block_size, dtype=dtype), [20, 31, 0, 17], [1, 1, 18, 20])


@pytest.mark.sweep
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


@pytest.mark.gate(1)
@pytest.mark.parametrize("shape", [Shape(has_sinks=True), Shape(has_sinks=True, sliding_window=10, soft_cap=4.0)])
def test_sinks(shape: Shape) -> None:
    """Of which the kernels know nothing."""
    for name in ("everything", "drafts and decode"):
        contract.check(FLASHINFER, shape, *STEPS[name])
    contract.check(FLASHINFER, shape, [20, 7], [1, 4], parents=[[-1], [-1, 0, 0, 2]])


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", ["everything", "decode batch", "prompts"])
def test_latents(name: str) -> None:
    contract.check(FLASHINFER, Shape(3, 1, 576, value_head_size=512), *STEPS[name])


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", ["everything", "decode batch"])
def test_fp8_with_one_scale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are kept as e4m3 has them, and beyond its range as its largest."""

    def as_stored(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
        numbers = contract.E4M3
        nearest = np.abs(numbers - x.double().numpy()[..., None]).argmin(-1)
        return torch.from_numpy(numbers[nearest])

    monkeypatch.setattr(contract, "as_stored", as_stored)
    shape = Shape(kv_dtype="fp8_e4m3", head_size=16, sliding_window=20)
    contract.check(FLASHINFER, shape, *STEPS[name])
    cached = Cached(FLASHINFER, shape, 4)
    k, v = cached.tokens(3, 2) * 200, cached.tokens(3, 2) * 400
    q, out = cached.step([0], [3], [[2]], k, v)
    torch.testing.assert_close(out.double(), contract.reference(q, k, v, 0, shape), atol=1e-4, rtol=1e-5)
    assert {plan["kv_data_type"] for plan in fake_flashinfer.PLANS} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("has_sinks", [False, True])
def test_fp8_with_the_checkpoints_scales(has_sinks: bool) -> None:
    """Of K and V: what is beyond e4m3's range is not cut off, and what is small keeps its bits."""
    shape = Shape(kv_dtype="fp8_e4m3", head_size=16, has_sinks=has_sinks)
    cached = Cached(FLASHINFER, shape, 4)
    cached.layer.k_scale, cached.layer.v_scale = 0.25, 8.0
    k, v = (torch.tensor(contract.E4M3[random_codes(seed)]).float() for seed in (1, 2))
    q, out = cached.step([0], [3], [[2]], k * 0.25, v * 8.0)
    wanted = contract.reference(q, k * 0.25, v * 8.0, 0, replace(shape, kv_dtype="auto"))
    torch.testing.assert_close(out.double(), wanted, atol=1e-3, rtol=1e-5)


def random_codes(seed: int) -> np.ndarray:
    """Of numbers that e4m3 has: [3 tokens, 2 heads, 16]."""
    return np.random.default_rng(seed).integers(0, len(contract.E4M3), (3, 2, 16))


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(sliding_window=10, soft_cap=5.0, dtype="bfloat16"),
        Shape(has_sinks=True),
        Shape(3, 1, 576, value_head_size=512),
    ],
    ids=["plain", "window", "sinks", "latent"],
)
def test_captured_decode_steps(shape: Shape) -> None:
    AttentionSuite().test_captured_decode_steps(FLASHINFER, shape)
    fixed = [wrapper for wrapper in fake_flashinfer.MADE if wrapper.fixed]
    assert len(fixed) == 1, "one for the size that was captured"


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(sliding_window=10), Shape(3, 1, 576, value_head_size=512)],
    ids=["plain", "window", "latent"],
)
def test_captured_chains_of_drafts(shape: Shape) -> None:
    AttentionSuite().test_captured_chains_of_drafts(FLASHINFER, shape)


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
    assert windowed["made"].use_tensor_cores is False


def test_a_mixed_step_is_cut_in_two() -> None:
    """Kernels for decoding get the sequences in front that decode; a prompt in front of them takes them along."""
    cached = Cached(FLASHINFER, Shape(), 8)
    tables = block_tables([17, 20, 1])
    cached.backend.plan(make_batch([16, 16, 0], [1, 4, 1], tables), cached.layers)
    decode, prompt = fake_flashinfer.PLANS
    assert (decode["wrapper"], prompt["wrapper"]) == (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
    )
    assert decode["indices"].tolist() == tables[0]
    assert prompt["qo_indptr"].tolist() == [0, 4, 5]
    assert prompt["indices"].tolist() == [*tables[1], *tables[2]]
    assert prompt["last_page_len"].tolist() == [4, 1]
    assert prompt["causal"]


def test_trees_have_wrappers_of_their_own() -> None:
    """Kernels for Hopper refuse masks, and a wrapper keeps a mask it was given once."""
    cached = Cached(FLASHINFER, Shape(sliding_window=7), 8, num_layers=2)
    cached.layers[1] = Shape(soft_cap=3.0).layer(1)
    tables = block_tables([20, 1])
    for parents in (None, [[-1, 0, 0, 1], [-1]], None):
        cached.backend.plan(make_batch([16, 0], [4, 1], tables, parents=parents), cached.layers)
    windowed, capped = fake_flashinfer.PLANS[2:4]
    assert (windowed["causal"], windowed["window_left"]) == (False, -1)
    assert len(windowed["custom_mask"]) == 4 * 20 + 1
    expected = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
    assert np.array_equal(capped["custom_mask"][:80].view(4, 20)[:, 16:].numpy(), expected)
    assert capped["custom_mask"][:80].view(4, 20)[:, :16].all()
    assert windowed["custom_mask"][:80].view(4, 20)[:, :16].sum(1).tolist() == [6, 5, 5, 4]


@pytest.mark.parametrize(("capability", "kernel"), [((9, 0), "fa3"), ((8, 0), "fa2"), ((10, 0), "fa2")])
def test_prompt_kernels_are_named(capability: tuple[int, int], kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fwk_attention.flashinfer import wrappers

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert wrappers._prompt_kernel(torch.device("cuda"), torch.bfloat16) == kernel
    assert wrappers._prompt_kernel(torch.device("cuda"), torch.float8_e4m3fn) == "fa2"


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_a_prompt_kernel_that_was_asked_for(kernel: Any) -> None:
    from fwk_attention.flashinfer.backend import FlashInferBackend

    options = FlashInferOptions(flashinfer_prompt_kernel=kernel)
    context = AttentionContext(torch.device("cpu"), torch.bfloat16, "auto", 16, options)
    layer = Shape(dtype="bfloat16").layer()
    FlashInferBackend(context).plan(make_batch([0, 16], [4, 1], block_tables([4, 17])), [layer])
    assert {wrapper.backend for wrapper in fake_flashinfer.MADE} == {kernel}
    FlashInferBackend(context).plan(make_batch([16], [4], block_tables([20]), parents=[[-1, 0, 0, 1]]), [layer])
    assert fake_flashinfer.MADE[-1].backend == "fa2", "the others have no masks of the caller's"
    if kernel == "fa3":
        with pytest.raises(ConfigError, match="--flashinfer-prompt-kernel fa3 reads K/V of the model's own precision"):
            FlashInferBackend(replace(context, kv_dtype="fp8_e4m3"))


def test_a_wrapper_is_planned_again_after_its_copies_ended() -> None:
    """Its pinned memory is refilled by ``plan``; two take turns, so that a step in flight is not waited for."""
    from fwk_attention.flashinfer.plan import LayerKind, Mode
    from fwk_attention.flashinfer.wrappers import Wrappers

    log: list[tuple[str, int]] = []

    class Event:
        def __init__(self) -> None:
            self.number = len(made)
            made.append(self)

        def record(self) -> None:
            log.append(("record", self.number))

        def synchronize(self) -> None:
            log.append(("wait", self.number))

    made: list[Event] = []
    wrappers = Wrappers(torch.device("cpu"), torch.bfloat16, Event)
    kind = LayerKind.of(Shape().layer())
    pages = torch.tensor([0, 1], dtype=torch.int32)
    shape = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32, "page_size": 16}
    for _ in range(4):
        wrapper = wrappers.next(kind, Mode.DECODE)
        wrapper.plan(indptr=pages, indices=pages[:1], last_page_len=pages[1:], **shape)
    assert log == [("record", 0), ("record", 1), ("wait", 0), ("record", 0), ("wait", 1), ("record", 1)]
    assert [plan["made"] for plan in fake_flashinfer.PLANS] == fake_flashinfer.MADE * 2


def _parameters(source: Path, name: str) -> dict[str, set[str]]:
    """Names of a class's parameters by method; ``plan`` of some versions hands its keywords on to ``_plan_impl``."""
    found: dict[str, set[str]] = {}
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if f"class {name}:" not in text:
            continue
        (definition,) = (x for x in ast.parse(text).body if isinstance(x, ast.ClassDef) and x.name == name)
        for method in definition.body:
            if isinstance(method, ast.FunctionDef):
                of = {"_plan_impl": "plan"}.get(method.name, method.name)
                names = (x.arg for x in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs))
                found.setdefault(of, set()).update(names)
    return found


@pytest.mark.parametrize(
    "name",
    ["BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper"],
)
def test_the_stand_in_has_the_signatures_of_the_package(name: str) -> None:
    """Read off the package's source where it is installed: importing it needs a CUDA build of torch."""
    try:
        package = importlib.metadata.distribution("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flashinfer-python is not installed")
    real = _parameters(Path(str(package.locate_file("flashinfer"))), name)
    for method in ("__init__", "plan", "run"):
        function = getattr(getattr(fake_flashinfer, name), method)
        mine = set(function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount])
        assert mine <= real[method], f"{name}.{method} has no {', '.join(sorted(mine - real[method]))}"


def test_captures_of_all_sizes_share_what_they_are_planned_in() -> None:
    """16 MiB each: of 37 sizes it was more than half a gigabyte, made after the memory had been measured."""
    from fwk_attention.flashinfer.plan import LayerKind, Mode
    from fwk_attention.flashinfer.wrappers import INT_WORKSPACE, Wrappers

    log: list[str] = []

    class Event:
        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

    wrappers = Wrappers(torch.device("cpu"), torch.bfloat16, Event)
    pages = wrappers.page_buffers(8, 16)
    kinds = [LayerKind.of(shape.layer()) for shape in (Shape(), Shape(sliding_window=7))]
    made = [wrappers.captured(kind, Mode.DECODE, pages.of(size)) for kind in kinds for size in (8, 4, 1)]
    for name in INT_WORKSPACE:
        buffers = [getattr(wrapper, name) for wrapper in fake_flashinfer.MADE]
        assert len({id(buffer) for buffer in buffers}) == len(kinds), "one step plans both kinds"
        assert buffers[0] is buffers[2] is not buffers[3]
    indptr = torch.arange(9, dtype=torch.int32)
    for wrapper, size in zip(made[:2], (8, 4), strict=True):
        where = {
            "indptr": indptr[: size + 1],
            "indices": indptr[:size],
            "last_page_len": torch.ones_like(indptr[:size]),
        }
        wrapper.plan(**where, num_qo_heads=4, num_kv_heads=2, head_dim=32, page_size=16)
    assert log == ["record", "wait", "record"], "the copy for another size may be under way"


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
        (Facts(host=GPU, dtype="bfloat16", kv_dtype="int8"), "keeps K/V as auto, fp8_e4m3, not int8"),
        (Facts(host=GPU, dtype="bfloat16", features=frozenset({"alibi_slopes"})), "lacks alibi_slopes"),
        (Facts(host=Host("cuda", (7, 5)), dtype="float16"), "needs compute capability 8.0 or newer"),
        (Facts(host=GPU, dtype="float16", head_size=64), "needs the package flashinfer-python>=0.6: pip install"),
    ],
)
def test_is_refused_with_the_reason(facts: Facts, message: str) -> None:
    with pytest.raises(PluginError, match="attention backend 'flashinfer' .*" + message):
        choose(PLUGINS, "attention", "flashinfer", facts)


@pytest.mark.parametrize(
    ("size", "features", "kv_dtype", "message"),
    [
        (576, {"latent"}, "auto", None),
        (576, {"latent", "kv_groups"}, "auto", None),
        (320, {"latent"}, "auto", "latents of 512 \\+ 64 numbers, this model's have 320"),
        (576, {"latent", "tree_mask"}, "auto", "lacks tree_mask in latent layers"),
        (576, {"latent"}, "fp8_e4m3", "keeps latents as auto, not fp8_e4m3"),
        (576, set[str](), "auto", "head sizes 64, 128, 256, this model's is 576"),
        (128, {"sinks", "sliding_window"}, "fp8_e4m3", None),
    ],
)
def test_latents_it_has_kernels_for(size: int, features: set[str], kv_dtype: str, message: str | None) -> None:
    spec = replace(FLASHINFER.declaration, needs=Needs(device="cuda"))
    facts = Facts(GPU, "bfloat16", kv_dtype, head_size=size, features=frozenset(features))
    refusal = spec.refusal(facts)
    assert refusal is None if message is None else re.search(message, refusal or "")
