"""The parts of the Triton backend that the contract does not see. Kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.interpreted import interpreted
from tests.helpers.machine_code import compiled

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, PluginError
from fwk.interfaces.declaration import Facts, Host
from fwk.plugins import choose, find
from fwk.types import ForwardBatch
from fwk_attention.triton_paged import backend, plan
from fwk_attention.triton_paged.plan import (
    INTERPRETED,
    LayerKind,
    Sizes,
    cut,
    decode_tiles,
    device_sizes,
    power_of_two,
)
from fwk_attention.triton_paged.rows import FP8, decode, encode_fp8
from fwk_kit.testing.attention_cases import STEPS, TREES, Cached, Shape, check
from fwk_kit.testing.base import installed
from fwk_kit.testing.batches import block_tables

pytestmark = interpreted

PLUGINS = installed()
TRITON = find(PLUGINS, "attention", "triton")
TORCH = find(PLUGINS, "attention", "torch")


SPLIT = 256


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs as small as a GPU's: several per sequence, several turns of their loops."""
    monkeypatch.setattr(backend, "INTERPRETED", device_sizes(32, 32, 4))


@pytest.mark.gate(3)
@pytest.mark.parametrize("window", [None, 7, SPLIT + 9])
@pytest.mark.parametrize("longest", [SPLIT, SPLIT + 1, 3 * SPLIT])
def test_tiles_of_next_tokens_are_those_of_any_step(window: int | None, longest: int) -> None:
    lens = np.array([1, 5, 8, longest, 40])
    batch = SimpleNamespace(seq_lens_np=lens.astype(np.int32), query_start_np=np.arange(6, dtype=np.int32))
    tiles, joins = decode_tiles(cast("ForwardBatch", batch), LayerKind(0, 2, window, INTERPRETED, SPLIT))
    ones = np.ones(5, np.int64)
    settings = {"tokens_per_tile": INTERPRETED.short_rows // 2, "window": window, "is_tree": False, "split": SPLIT}
    expected = cut(np.arange(5), np.arange(5), ones, lens - 1, **settings)  # type: ignore[arg-type]
    assert (tiles.tolist(), joins.tolist()) == (expected[0].tolist(), expected[1].tolist())


@pytest.mark.sweep
def test_split_tile_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the size that the option says, in steps that are launched and captured, and the same tokens."""
    make_checkpoint(tmp_path, "llama")
    seen: set[int] = set()
    real = plan.cut

    def watched(*arrays: Any, split: int | None, **more: Any) -> Any:
        tiles, joins = real(*arrays, split=split, **more)
        seen.update((tiles[:, 6] - tiles[:, 5])[tiles[:, 7] >= 0].tolist() if split else [])
        return tiles, joins

    monkeypatch.setattr(plan, "cut", watched)
    found = []
    for more in ({"triton_attention_split_tile_size": 16}, {}):
        with fwk.LLM(str(tmp_path), attention_backend="triton", dtype="float32", max_total_tokens=256, **more) as llm:
            found.append(llm.generate([list(range(3, 53))], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids)
        assert max(seen, default=0) == (16 if more else 0)
        seen.clear()
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match="triton-attention-split-tile-size"):
        fwk.LLM(str(tmp_path), attention_backend="triton", triton_attention_split_tile_size=20)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        "everything",
        "drafts and decode",
        pytest.param("decode, lengths far apart", marks=pytest.mark.sweep),
        pytest.param("long chunk", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.usefixtures("as_on_a_device")
def test_tiles_of_a_device(name: str) -> None:
    check(TRITON, Shape(sliding_window=300), *STEPS[name])


@pytest.mark.sweep
@pytest.mark.usefixtures("as_on_a_device")
def test_small_tiles_of_trees_and_latents() -> None:
    pasts, parents = TREES["several"]
    lens = [len(tree or []) for tree in parents]
    check(TRITON, Shape(8, 1, 40, value_head_size=32, kv_dtype="int8"), pasts, lens, parents=parents)
    check(TRITON, Shape(20, 1, 48, value_head_size=24, sliding_window=9), pasts, lens, parents=parents)
    check(TRITON, Shape(kv_dtype="fp8_e4m3", soft_cap=3.0), [400, 33], [2, 21])


@pytest.mark.gate(3)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_what_the_torch_backend_writes(kv_dtype: str, dtype: str) -> None:
    """To the bit: small and large numbers, ties, rows of zeros, all of the format's codes."""
    shape = Shape(head_size=64, kv_dtype=kv_dtype, dtype=dtype)
    caches = []
    for registered in (TORCH, TRITON):
        cached = Cached(registered, shape, 4, is_dirty=False)
        x = cached.tokens(40, 2).float()
        x[0] = 0
        x[1] *= 1e-20
        x[2] *= 1e20
        x[3] *= torch.logspace(-6, 0, 64)
        x[4] = torch.arange(-31, 33) * 0.5  # halves of a scale that is a power of two
        x[4, :, 0] = 127.0 if kv_dtype == "int8" else 448.0
        cached.step([0], [40], [[2, 1, 3]], x.to(cached.dtype), -x.to(cached.dtype))
        caches.append(cached.layer.kv_cache)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


@triton.jit
def code_kernel(codes, read, given, written):
    i = tl.arange(0, 256)
    tl.store(read + i, decode(tl.load(codes + i), FP8))
    j = tl.arange(0, 1024)
    tl.store(written + j, encode_fp8(tl.load(given + j)))


def test_fp8_codes() -> None:
    """Every finite code is read as torch reads it, and is what its number is written as."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    finite = numbers.isfinite()
    between = (numbers[:126] + numbers[1:127]) / 2  # ties
    alongside = torch.cat([between.nextafter(between * 0 + x) for x in (0.0, 1e9)])
    given = torch.cat([numbers[finite], between, -between, alongside, -alongside])
    given = torch.nn.functional.pad(given, (0, 1024 - len(given)))
    read, written = torch.empty(256), torch.empty(1024, dtype=torch.uint8)
    code_kernel[(1,)](codes, read, given, written)
    assert torch.equal(read[finite], numbers[finite])
    assert torch.equal(written.view(torch.float8_e4m3fn).float(), given.to(torch.float8_e4m3fn).float())


def test_neighbours_do_not_change_a_bit() -> None:
    """How a sequence is cut depends on itself alone."""
    shape = Shape()
    lens = [700, 40, 300]
    tables = block_tables(lens)
    outputs = []
    for chosen in ([0], [1, 0, 2]):
        cached = Cached(TRITON, shape, 80)
        random = torch.Generator().manual_seed(1)
        x = [torch.randn(n, 2, 32, generator=random).to(cached.dtype) for n in lens]
        mine = [tables[i] for i in chosen]
        past = torch.cat([x[i][:-1] for i in chosen])
        cached.step([0] * len(chosen), [lens[i] - 1 for i in chosen], mine, past, past)
        cached.tokens = lambda count, heads: torch.ones(count, heads, 32)  # type: ignore[method-assign]
        last = torch.cat([x[i][-1:] for i in chosen])
        outputs.append(cached.step([lens[i] - 1 for i in chosen], [1] * len(chosen), mine, last, last)[1])
    assert torch.equal(outputs[0][0], outputs[1][1])


def bits(chunks: list[int], *, alongside: int = 0) -> torch.Tensor:
    """Of one sequence's tokens in a deterministic run, cut like that; ``alongside``: tokens of another in each step."""
    total = sum(chunks)
    tables = block_tables([total, 100])
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(total + 100, n, 32, generator=random) for n in (8, 2, 2))
    cached = Cached(TRITON, Shape(8, 2), 40, is_deterministic=True)
    parts, past = [], 0
    for n in chunks:
        chosen = torch.tensor([*range(past, past + n), *range(total, total + alongside)])
        cached.tokens = lambda count, heads, given=q[chosen]: given  # type: ignore[method-assign]
        new, pasts = ([n, alongside], [past, 0]) if alongside else ([n], [past])
        parts.append(cached.step(pasts, new, tables[: len(new)], k[chosen], v[chosen])[1][:n])
        past += n
    return torch.cat(parts)


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's tiles, and parts of 32 keys of which a launch has few, so that a short prompt has several."""
    monkeypatch.setattr(backend, "INTERPRETED", device_sizes(32, 32, 4))
    monkeypatch.setattr(backend, "LayerKind", lambda *parts: LayerKind(*parts[:4], 32, *parts[5:]))
    monkeypatch.setattr(plan, "MAX_PARTS", 24)


WHOLE = 70


@pytest.mark.sweep
@pytest.mark.usefixtures("short_parts", "same_rows")
def test_bits_do_not_depend_on_chunks_or_neighbours() -> None:
    whole = bits([WHOLE])
    assert torch.equal(bits([17, 44, *[1] * 3, 6], alongside=20), whole)
    assert torch.equal(bits([40, 16, 14]), whole)


@pytest.mark.sweep
@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("is_broken", [False, True])
def test_one_kernel_computes_chunks_of_all_lengths(monkeypatch: pytest.MonkeyPatch, is_broken: bool) -> None:
    """What the interpreter cannot show: it adds up tiles of two sizes alike, matrix units do not."""
    compiled_for: set[tuple[Any, ...]] = set()

    def watched(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        if kernel is backend.attend_tiles:
            compiled_for.add((*constants.items(), *(x.dtype for x in arguments if isinstance(x, torch.Tensor))))
        launch(kernel, grid, *arguments, **constants)

    launch = backend._launch
    monkeypatch.setattr(backend, "_launch", watched)
    if is_broken:
        monkeypatch.setattr(backend, "deterministic", lambda sizes: sizes)
        monkeypatch.setattr(backend, "INTERPRETED", Sizes(16, 16, 64, 16))
    bits([40, 1, 16, 20], alongside=30)
    assert len(compiled_for) == (2 if is_broken else 1)


@pytest.mark.sweep
@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("broken", ["long chunks whole", "parts by neighbours"])
def test_what_would_change_bits_is_noticed(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    if broken == "parts by neighbours":  # as many parts as fill a device
        real = plan.cut

        def by_neighbours(chosen: Any, *arrays: Any, split: int | None, **more: Any) -> Any:
            return real(chosen, *arrays, split=None if split is None else split * len(chosen), **more)

        monkeypatch.setattr(plan, "cut", by_neighbours)
    else:
        monkeypatch.setattr(backend, "LayerKind", lambda *parts: LayerKind(*parts[:4], 32, splits_all=False))
    assert not torch.equal(bits([40, *[1] * 8], alongside=1), bits([48]))


@pytest.mark.gate(1)
@pytest.mark.parametrize("most", [1, 7, 64])
def test_launches_of_few_parts(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Each has its own places from 0 on, and together they are all tiles and joins, in order."""
    monkeypatch.setattr(plan, "MAX_PARTS", most)
    new, pasts = np.array([40, 3, 90]), np.array([100, 0, 10])
    starts = np.cumsum(new) - new
    tiles, joins = cut(np.arange(3), starts, new, pasts, tokens_per_tile=8, window=None, is_tree=False, split=32)
    launches = plan.apart(tiles, joins)
    assert len(launches) > 1 or most == 64
    assert np.array_equal(np.concatenate([some[:, :7] for some, _ in launches]), tiles[:, :7])
    assert np.array_equal(np.concatenate([joined[:, [0, 1, 2, 4]] for _, joined in launches]), joins[:, [0, 1, 2, 4]])
    for some, joined in launches:
        places = some[some[:, 7] >= 0, 7].tolist()
        assert places == list(range(int(joined[:, 4].sum())))
        assert joined[:, 3].tolist() == (np.cumsum(joined[:, 4]) - joined[:, 4]).tolist()
        assert len(joined) == 1 or len(places) <= most
    (whole,) = plan.apart(tiles, joins[:0])
    assert whole[0] is tiles


@pytest.mark.gate(4)
@pytest.mark.parametrize("seed", range(10))
def test_tiles_cover_each_key_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 6))
    num_new, pasts = random.integers(1, 90, count), random.integers(0, 900, count)
    starts = np.cumsum(num_new) - num_new
    window = int(random.integers(1, 400)) if seed % 2 else None
    is_tree = seed % 3 == 0
    split = 64 if seed % 5 else None
    per_tile = int(2 ** random.integers(0, 6))
    tiles, joins = cut(
        np.arange(count), starts, num_new, pasts, tokens_per_tile=per_tile, window=window, is_tree=is_tree, split=split
    )
    seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for sequence, start, new, past, first, key, last, part in tiles.tolist():
        assert (start, new, past) == (starts[sequence], num_new[sequence], pasts[sequence])
        assert key < last
        seen.setdefault((sequence, first), []).append((key, last, part))
    for i in range(count):
        assert [first for sequence, first in seen if sequence == i] == list(range(0, int(num_new[i]), per_tile))
    places = []
    for (sequence, first), parts in seen.items():
        assert all(a[1] == b[0] for a, b in pairwise(parts))
        past, new = int(pasts[sequence]), int(num_new[sequence])
        assert parts[-1][1] == past + (new if is_tree else min(first + per_tile, new))
        reach = 0 if window is None else max(0, past + (0 if is_tree else first) - window + 1)
        assert parts[0][0] == reach
        if len(parts) == 1:
            assert parts[0][2] == -1
            continue
        assert split is not None
        assert all(last - key <= split for key, last, _ in parts)
        own = [part for _, _, part in parts]
        places += own
        assert [int(starts[sequence]), new, first, own[0], len(own)] in joins.tolist()
    assert places == list(range(len(places)))
    assert int(joins[:, 4].sum()) == len(places)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 576])
def test_power_of_two(n: int) -> None:
    found = power_of_two(n)
    assert found >= n > found // 2
    assert found & (found - 1) == 0


@pytest.mark.parametrize("sizes", [(64, 64, 2), (128, 128, 4), (256, 256, 2), (576, 512, 2)])
def test_device_sizes_are_powers_of_two(sizes: tuple[int, int, int]) -> None:
    found: Sizes = device_sizes(*sizes)
    for n in (found.short_rows, found.rows, found.keys):
        assert n >= 16
        assert power_of_two(n) == n
    assert power_of_two(found.tokens) == found.tokens


@pytest.mark.sweep
def test_serves_a_model(tiny_llm: Callable[..., fwk.LLM]) -> None:
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [[7, 8, 9] * 3, [5] * 20]
    for kv_cache_dtype in ("auto", "int8"):
        plain, ours = (
            tiny_llm(attention_backend=name, kv_cache_dtype=kv_cache_dtype, chunked_prefill_size=16)
            for name in ("torch", "triton")
        )
        assert ours.engine.info.chosen["attention"] == "triton"
        expected = [done.token_ids for done in plain.generate(prompts, greedy)]
        assert [done.token_ids for done in ours.generate(prompts, greedy)] == expected


def test_never_chosen_by_itself_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(PLUGINS, "attention", "auto", Facts()).chosen
    assert chosen is not None
    assert chosen.name not in ("triton", "flashinfer")
    assert TRITON.declaration.refusal(Facts()) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(PluginError, match="needs a cuda device, or TRITON_INTERPRET=1 to run its kernels in"):
        choose(PLUGINS, "attention", "triton", Facts())


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (Facts(host=Host("cuda", (7, 5))), "needs compute capability 8.0 or newer"),
        (Facts(kv_dtype="fp5"), "keeps K/V as auto, int8, fp8_e4m3, not fp5"),
        (Facts(features=frozenset({"alibi_slopes"})), "lacks alibi_slopes"),
        (Facts(host=Host("cuda", (9, 0)), kv_dtype="int8", features=frozenset({"latent", "tree_mask"})), None),
    ],
)
def test_refusals(facts: Facts, message: str | None) -> None:
    refusal = TRITON.declaration.refusal(facts)
    assert refusal is None if message is None else message in (refusal or "")


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "variant",
    [
        "90 bf16 plain full short",
        "80 fp16 fp8 latent short",
        *(
            pytest.param(f"90 {dtype} {form} {kind} long", marks=pytest.mark.sweep)
            for dtype in ("bf16", "fp32")
            for form in ("plain", "int8", "fp8")
            for kind in ("full", "tree", "latent")
        ),
    ],
)
def test_machine_code(variant: str) -> None:
    """No GPU is needed to compile for one; that they fit into its shared memory is checked, too."""
    limit = {"80": 163, "90": 227}[variant[:2]] * 1024
    found = {code["name"]: code for code in compiled(*variant.split())}
    assert {"store_rows", "attend_tiles"} <= set(found)
    for name, code in found.items():
        assert code["shared"] <= limit
        # Some numbers of trees and of quantised K/V are kept in local memory; tiles of quantised latents in float32
        # would have to be smaller than a matrix product.
        bound = 1 if "plain" in variant and "tree" not in variant else 160
        if "fp32" not in variant or "latent" not in variant or "plain" in variant:
            assert max(code["local_loads"], code["local_stores"]) <= bound, f"{name}: {code}"
    if "latent" not in variant:
        turn = found["turn_rows"]
        assert turn["local_loads"] == turn["local_stores"] == 0 < turn["loads_of_128_bits"], turn
    attend = found["attend_tiles"]
    if "fp32" not in variant:
        assert attend["matrix_products"] > 0
    if variant == "90 bf16 plain full long":
        assert attend["hopper_matrix_products"] > 0
    if "plain full" in variant:
        assert attend["loads_of_128_bits"] > 0
