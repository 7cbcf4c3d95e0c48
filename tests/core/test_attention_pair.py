"""One attention backend for prompts and another for next tokens: the same tokens, one cache, and clear refusals."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.interpreted import interpreted
from tests.helpers.pretend_cuda import JOURNAL, flashinfer_stand_in, pretended, triton_kernels

import fwk
from fwk import AttentionBackendSpec, SamplingParams, hookimpl
from fwk.errors import ConfigError, FwkError, PluginError
from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from fwk.interfaces.declaration import Facts
from fwk.plugins import PluginSet, build_config, discover
from fwk.types import ForwardBatch
from fwk_attention.cpu.backend import CpuBackend
from fwk_attention.pair import AttentionPairSpec, PairOptions, offered
from fwk_attention.pair.backend import AttentionPair
from fwk_attention.torch_sdpa.backend import TorchBackend
from fwk_kit.testing import AttentionSuite
from fwk_kit.testing.base import installed
from fwk_kit.testing.batches import make_batch
from fwk_native.thread_pool import ThreadPool

PROMPTS = [[1, 7, 3, 9] * 9, list(range(40, 75)), [5, 5, 6], [11] * 20]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_total_tokens": 2048,
    "max_running_requests": 3,
    "chunked_prefill_size": 16,
    "dtype": "float32",
    "check_blocks": True,
}
SAMPLING = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (24, 9, 30, 6)]
PLUGINS = installed()


def pair_of(prefill: str, decode: str, plugins: PluginSet = PLUGINS) -> AttentionPairSpec:
    asked = PairOptions(prefill_attention_backend=prefill, decode_attention_backend=decode)
    items, name = offered(plugins.family("attention"), "auto", asked)
    assert [item.name for item in items] == [name]
    spec = items[0].declaration
    assert isinstance(spec, AttentionPairSpec)
    return spec


class CpuThenTorch(AttentionPair):
    """For the contract: built from one context."""

    classes: tuple[type[AttentionBackend], type[AttentionBackend]] = (CpuBackend, TorchBackend)

    def __init__(self, context: AttentionContext) -> None:
        context = replace(context, kv_layout="rows")
        prefill, decode = self.classes
        super().__init__(prefill(context), decode(context))


class TorchThenCpu(CpuThenTorch):
    classes = (TorchBackend, CpuBackend)


@pytest.mark.gate(1)
class TestCpuForPromptsAndTorchForNextTokens(AttentionSuite):
    declaration = replace(pair_of("cpu", "torch"), load=f"{__name__}:CpuThenTorch")


@pytest.mark.gate(1)
class TestTorchForPromptsAndCpuForNextTokens(AttentionSuite):
    declaration = replace(pair_of("torch", "cpu"), load=f"{__name__}:TorchThenCpu")


def tokens(folder: Path, **options: Any) -> tuple[list[list[int]], dict[str, str]]:
    with fwk.LLM(str(folder), **OPTIONS | options) as llm:
        return [done.token_ids for done in llm.generate(PROMPTS, SAMPLING)], dict(llm.engine.info.chosen)


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "settings", [{}, {"page_size": 8, "max_total_tokens": 160}, {"speculative_algorithm": "ngram"}]
)
@pytest.mark.parametrize(("prefill", "decode"), [("cpu", "torch"), ("torch", "cpu")])
def test_the_tokens_are_those_of_either_alone(
    tiny_folder: Path, prefill: str, decode: str, settings: dict[str, Any]
) -> None:
    sides = {"prefill_attention_backend": prefill, "decode_attention_backend": decode}
    both, chosen = tokens(tiny_folder, **sides, **settings)
    assert chosen["attention"] == f"{prefill}-prefill.{decode}-decode"
    assert chosen["step"].startswith("eager (prompts and next tokens have attention backends of their own")
    assert both == tokens(tiny_folder, attention_backend="cpu", **settings)[0]
    assert both == tokens(tiny_folder, attention_backend="torch", **settings)[0]


def test_each_computes_its_part_of_a_mixed_step() -> None:
    """Three decode, a chunk of a prompt follows: each backend is given its own tokens, and nothing else."""
    seen: list[tuple[str, int, list[int], bool]] = []

    class Noting(TorchBackend):
        def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> Any:
            seen.append((self.name, batch.num_tokens, batch.query_start_np.tolist(), batch.is_decode))
            assert batch.query_start.tolist() == batch.query_start_np.tolist()
            assert all(layer.state is None or layer.kv_cache is not None for layer in layers)
            return super().plan(batch, layers)

    pair, layer = _pair_and_layer(Noting)
    batch = make_batch([4, 5, 6, 0], [1, 1, 1, 7], [[1], [2], [3], [4]])
    _run(pair, layer, batch)
    assert seen == [("decode", 3, [0, 1, 2, 3], True), ("prefill", 7, [0, 7], False)]
    seen.clear()
    # The first sequence reads block 4, which the prompt fills in this step: then one backend stores all of it first.
    batch = make_batch([20, 5, 0], [1, 1, 16], [[4, 1], [2], [4]])
    _run(pair, layer, batch)
    assert seen == [("prefill", 18, [0, 1, 2, 18], False)]


def _pair_and_layer(backend: Any) -> tuple[AttentionPair, AttentionLayer]:
    context = AttentionContext(torch.device("cpu"), torch.float32, "auto", 16, threads=ThreadPool(), kv_layout="rows")
    sides = [backend(context) for _ in range(2)]
    for side, name in zip(sides, ("prefill", "decode"), strict=True):
        side.name = name
    pair = AttentionPair(*sides)
    layer = AttentionLayer(0, 4, 2, 32, 32**-0.5)
    layer.kv_cache = torch.full((6, *pair.block_format(layer.kv_spec).block_shape), float("nan"))
    return pair, layer


def _run(pair: AttentionPair, layer: AttentionLayer, batch: ForwardBatch) -> None:
    layers = [layer]
    with torch.inference_mode():
        batch.plan = pair.plan(batch, layers)
        n = batch.num_tokens
        pair.forward(torch.randn(n, 4, 32), torch.randn(n, 2, 32), torch.randn(n, 2, 32), layer, batch)


def test_what_an_earlier_owner_left_is_cleared_for_the_other_backend() -> None:
    """The kernel for CPUs clears nothing, as it reads no slot that was not written; torch reads whole blocks."""
    context = AttentionContext(torch.device("cpu"), torch.float32, "auto", 16, threads=ThreadPool(), kv_layout="rows")
    pair = CpuThenTorch(context)
    layer = AttentionLayer(0, 4, 2, 32, 32**-0.5)
    layer.kv_cache = torch.full((3, *pair.block_format(layer.kv_spec).block_shape), float("nan"))
    layers = [layer]
    for past, new in ((0, 5), (5, 1)):  # the first by cpu, which begins the block; the second by torch
        batch = make_batch([past], [new], [[1]])
        with torch.inference_mode():
            batch.plan = pair.plan(batch, layers)
            out = pair.forward(*(torch.randn(new, heads, 32) for heads in (4, 2, 2)), layer, batch)
    assert torch.isfinite(out).all()


def test_rows_are_the_same_bytes_in_both() -> None:
    context = AttentionContext(torch.device("cpu"), torch.float32, "auto", 16, threads=ThreadPool(), kv_layout="rows")
    caches: list[np.ndarray] = []
    for backend in (CpuBackend(context), TorchBackend(context)):
        layer = AttentionLayer(0, 6, 2, 32, 1.0)
        layer.kv_cache = torch.zeros(4, *backend.block_format(layer.kv_spec).block_shape)
        batch = make_batch([0, 0], [20, 3], [[1, 3], [2]])
        random = torch.Generator().manual_seed(1)
        with torch.inference_mode():
            batch.plan = backend.plan(batch, [layer])
            backend.forward(*(torch.randn(23, heads, 32, generator=random) for heads in (6, 2, 2)), layer, batch)
        caches.append(layer.kv_cache.numpy())
    assert np.array_equal(*caches)


@pytest.mark.sweep
def test_one_named_leaves_the_other_to_auto(tiny_folder: Path) -> None:
    assert tokens(tiny_folder, decode_attention_backend="torch")[1]["attention"] == "cpu-prefill.torch-decode"
    assert tokens(tiny_folder, prefill_attention_backend="torch")[1]["attention"] == "torch-prefill.cpu-decode"
    assert tokens(tiny_folder, prefill_attention_backend="cpu")[1]["attention"] == "cpu"
    # In int8 no other can share a cache with torch here.
    assert tokens(tiny_folder, prefill_attention_backend="torch", kv_cache_dtype="int8")[1]["attention"] == "torch"


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        (
            {"prefill_attention_backend": "cpu", "decode_attention_backend": "torch", "kv_cache_dtype": "int8"},
            PluginError,
            "'cpu' and 'torch' lay out K/V in int8 differently: name one for both",
        ),
        (
            {"prefill_attention_backend": "torch", "decode_attention_backend": "flashinfer"},
            PluginError,
            "computes next tokens with 'flashinfer', which computes in float16, bfloat16",
        ),
        ({"prefill_attention_backend": "trch"}, PluginError, "unknown attention backend 'trch'"),
        (
            {
                "attention_backend": "triton",
                "prefill_attention_backend": "torch",
                "decode_attention_backend": "cpu",
            },
            ConfigError,
            "--attention-backend triton does nothing alongside --prefill-attention-backend torch",
        ),
    ],
)
def test_what_cannot_be_is_refused(tiny_folder: Path, options: dict[str, Any], error: type[FwkError], why: str) -> None:
    with pytest.raises(error, match=why):
        fwk.LLM(str(tiny_folder), **OPTIONS, **options)


def test_a_backend_without_a_shared_layout_is_refused() -> None:
    """A plugin that says nothing of layouts: it may lay out its blocks in any way."""

    class Silent:
        @hookimpl
        def attention_backends(self) -> list[AttentionBackendSpec]:
            return [AttentionBackendSpec(name="silent", load="fwk_attention.torch_sdpa.backend:TorchBackend")]

    plugins = discover()
    plugins.register(Silent(), "attention.silent", "tests", "1")
    refusal = pair_of("silent", "torch", plugins).refusal(Facts())
    assert refusal == "needs one KV cache for both, and 'silent' and 'torch' lay out K/V differently: name one for both"


def test_layouts_that_differ_in_spite_of_the_declaration_are_refused() -> None:
    context = AttentionContext(torch.device("cpu"), torch.float32, "auto", 16)  # so that cpu lays out tiles
    pair = AttentionPair(CpuBackend(context), TorchBackend(context))
    with pytest.raises(ConfigError, match="lay out K/V differently: blocks of"):
        pair.block_format(AttentionLayer(0, 4, 2, 32, 1.0).kv_spec)


def test_other_servers_values_are_understood() -> None:
    given = {"prefill_attention_backend": "SDPA", "decode_attention_backend": "CPU"}
    named = {"prefill_attention_backend": "torch", "decode_attention_backend": "cpu"}
    assert build_config(PLUGINS, given).plugin_options == {"features.attention_pair": named}
    with pytest.raises(ConfigError, match="flashmla: this kernel has no plugin"):
        build_config(PLUGINS, {"decode_attention_backend": "flashmla"})


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("flashinfer-stand-in", "torch"),
        ("torch", "flashinfer-stand-in"),
        pytest.param("flashinfer-stand-in", "triton", marks=[pytest.mark.sweep, interpreted]),
    ],
)
def test_on_a_device_with_graphs(tiny_folder: Path, prefill: str, decode: str) -> None:
    """Decode steps are captured where the decode backend can plan for that, and nothing waits or is overwritten."""
    expected, _ = tokens(tiny_folder, attention_backend="torch", device="cpu")
    options = OPTIONS | {"operator_backend": "torch", "sampling_backend": "torch"}
    sides = {"prefill_attention_backend": prefill, "decode_attention_backend": decode}
    kernels = triton_kernels() if decode == "triton" else nullcontext()
    with (
        kernels,
        flashinfer_stand_in(),
        pretended() as plugins,
        fwk.LLM(str(tiny_folder), plugins=plugins, device="pretended", **options, **sides) as llm,
    ):
        step = llm.engine.info.chosen["step"]
        JOURNAL.clear()
        assert [done.token_ids for done in llm.generate(PROMPTS, SAMPLING)] == expected
        assert JOURNAL.faults == []
        assert (JOURNAL.launches["graph"] > 0) == (decode != "torch")
    if decode != "torch":
        assert step.startswith("captured (next tokens of ")
    else:
        assert f"attention {prefill}-prefill.torch-decode plans each step anew" in step
