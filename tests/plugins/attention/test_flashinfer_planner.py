"""The FlashInfer adapter over the package itself, on a CUDA runtime without a device (``make flashinfer``).

The package's wrappers check their arguments, its C++ plans and launches; kernels are compiled for an H100 and not run.
So what these tests say is that each step's arguments are taken, which kernels would run, over which keys, and that a
plan in use is not overwritten. What the kernels compute is checked on a GPU (tests/gpu).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers import cudart
from tests.helpers.cudart.served import BLOCK, STEPS, TREE, Served

from fwk.interfaces.attention import CaptureSizes
from fwk_kit.testing.attention_cases import Shape, block_tables
from fwk_kit.testing.batches import make_batch

if TYPE_CHECKING:
    from fwk_attention.flashinfer.wrappers import PlannedWrapper

pytestmark = [pytest.mark.flashinfer, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800)]

FOLDER = Path(__file__).parents[3] / "build" / "flashinfer-modules"
SIZE = 128
DECODE, PROMPT, HOPPER, LATENT = "BatchDecode", "BatchPrefillWithPagedKVCache", "PrefillWithKVCacheKernel", "MLA"
PLAIN = Shape(4, 2, SIZE, BLOCK, dtype="bfloat16")
GROUPS = Shape(8, 2, SIZE, BLOCK, dtype="bfloat16")  # of 4 query heads
WINDOW = Shape(8, 2, SIZE, BLOCK, dtype="bfloat16", sliding_window=100, soft_cap=30.0)
FP8 = Shape(8, 2, SIZE, BLOCK, dtype="bfloat16", kv_dtype="fp8_e4m3")
LATENTS = Shape(16, 1, 576, BLOCK, dtype="bfloat16", value_head_size=512)


@pytest.fixture(scope="module")
def runtime() -> cudart.Runtime:
    return cudart.install(FOLDER)


@pytest.fixture(autouse=True)
def nothing_asked_of_the_device(runtime: cudart.Runtime) -> Iterator[None]:
    yield
    runtime.forget()


def kinds(launched: Sequence[cudart.Launched]) -> Counter[str]:
    """How many launches there are of which kernel, but for those that merge the parts of a sequence."""
    names = [launch.name for launch in launched if "Merge" not in launch.name]
    return Counter(next(kind for kind in (DECODE, PROMPT, HOPPER, LATENT) if kind in name) for name in names)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shape", [PLAIN, GROUPS, WINDOW, FP8], ids=["plain", "groups", "window and cap", "fp8"])
def test_steps_are_planned_and_launched(runtime: cudart.Runtime, shape: Shape, name: str) -> None:
    pasts, num_new = STEPS[name]
    served = Served(runtime, shape, 256)
    served.plan(pasts, num_new)
    launched = kinds(served.launch())
    num_decodes = next((i for i, n in enumerate(num_new) if n > 1), len(num_new))
    wanted = Counter[str]()
    if num_decodes:
        wanted[DECODE if shape is PLAIN else PROMPT] += 1
    if num_decodes < len(num_new):
        wanted[PROMPT] += 1
    assert launched == wanted


def test_trees_are_masked(runtime: cudart.Runtime) -> None:
    """By the kernel's third kind of mask, the caller's own; chains by its second."""
    served = Served(runtime, GROUPS, 64)
    for parents, mode in ((TREE, 2), (None, 1)):
        served.plan([20, 300], [5, 5], parents)
        (launched,) = (x for x in served.launch() if "Merge" not in x.name)
        assert re.search(rf"MaskModeE{mode}", launched.name), launched.name


@pytest.mark.parametrize("name", ["prompts", "mixed"])
def test_prompts_on_hopper(runtime: cudart.Runtime, name: str) -> None:
    served = Served(runtime, GROUPS, 256, "fa3")
    served.plan(*STEPS[name])
    launched = kinds(served.launch())
    assert launched == {HOPPER: 1} | ({PROMPT: 1} if name == "mixed" else {})


@pytest.mark.parametrize("name", STEPS)
def test_latents(runtime: cudart.Runtime, name: str) -> None:
    served = Served(runtime, LATENTS, 256)
    served.plan(*STEPS[name])
    assert kinds(served.launch()) == {LATENT: 1}


@pytest.mark.parametrize(
    ("pasts", "num_new"),
    [([5, 100, 1000], [1, 1, 1]), ([8191], [1]), ([16 * i for i in range(64)], [1] * 64)],
    ids=["three", "one long", "many"],
)
def test_a_plan_reads_every_key_once(runtime: cudart.Runtime, pasts: list[int], num_new: list[int]) -> None:
    """Decoding, followed in the planner's own tables: the parts of a sequence are all of it."""
    served = Served(runtime, PLAIN, 2000)
    plan = served.plan(pasts, num_new)
    assert keys_read(runtime, the_wrapper(plan), served.batch.seq_lens_np)


def the_wrapper(plan: Any) -> PlannedWrapper:
    (parts,) = plan.runs.values()
    ((_, wrapper),) = parts
    return wrapper


def keys_read(runtime: cudart.Runtime, planned: PlannedWrapper, lens: np.ndarray) -> bool:
    """Whether each of the sequences' keys is in one part exactly (FlashInfer's DecodePlanInfo)."""
    runtime.drain()
    assert runtime.num_overwritten == 0
    wrapper = planned._wrapper
    info = [int(x) for x in wrapper._plan_info]
    table = wrapper._int_workspace_buffer.numpy()

    def at(offset: int, count: int) -> np.ndarray:
        return table[offset : offset + 4 * count].view(np.int32)

    num_parts, requests, tiles, starts, valid, chunk = info[0], *info[3:8]
    is_captured, is_split = info[8:10]
    size = int(at(chunk, 1)[0])
    used = int(at(starts, len(lens) + 1)[-1]) if is_split else len(lens)
    if is_captured and is_split:
        assert table[valid : valid + num_parts].tolist() == [i < used for i in range(num_parts)]
    seen = [np.zeros(n, int) for n in lens]
    for request, tile in zip(at(requests, used), at(tiles, used), strict=True):
        part = slice(tile * size, (tile + 1) * size) if is_split else slice(None)
        assert len(seen[request][part]), "a part beyond the sequence"
        seen[request][part] += 1
    return all((counts == 1).all() for counts in seen)


class TestCaptured:
    """Steps of one size, of which the first was captured: the others must launch the same."""

    sizes = CaptureSizes(num_seqs=8, max_seq_len=4096, num_blocks=600, null_block=0)
    LENS = ([100] * 8, [1] * 8, [4096, 1, 1, 1, 1, 1, 1, 1], [64 * i + 1 for i in range(8)])

    @pytest.mark.parametrize("shape", [PLAIN, GROUPS, LATENTS], ids=["plain", "groups", "latents"])
    def test_the_same_launches(self, runtime: cudart.Runtime, shape: Shape) -> None:
        served = Served(runtime, shape, 700)
        seen, where = list[list[cudart.Launched]](), list[list[int]]()
        backend, layer = served.backend, served.layer
        backend.init_capture([layer], self.sizes)
        for lens in self.LENS:
            wrapper = self.plan(served, lens)
            seen.append(served.launch())
            where.append([int(x) for x in wrapper._wrapper._plan_info])
            if shape is PLAIN:
                assert keys_read(runtime, wrapper, np.array(lens))
        assert len(seen[0]) > 0
        assert all(launches == seen[0] for launches in seen), "the graph holds the first"
        assert all(info == where[0] for info in where), "kernels' arguments are where the first plan put them"

    def plan(self, served: Served, lens: Sequence[int]) -> PlannedWrapper:
        tables = block_tables(lens, BLOCK)
        served.batch = make_batch([n - 1 for n in lens], [1] * len(lens), tables, block_size=BLOCK)
        plan = served.batch.plan = served.backend.plan_static(served.batch, [served.layer])
        assert plan is not None
        return the_wrapper(plan)

    def test_pages_are_where_the_first_plan_had_them(self, runtime: cudart.Runtime) -> None:
        """What kernels read of a step's pages is in buffers that stay."""
        served = Served(runtime, PLAIN, 700)
        served.backend.init_capture([served.layer], self.sizes)
        for lens in self.LENS:
            planned = self.plan(served, lens)
            wrapper = planned._wrapper
            counts = [-(-n // BLOCK) for n in lens]
            assert wrapper._paged_kv_indptr_buf.tolist() == [0, *np.cumsum(counts)]
            assert wrapper._paged_kv_last_page_len_buf.tolist() == [(n - 1) % BLOCK + 1 for n in lens]
            pages = [block for table in block_tables(lens, BLOCK) for block in table]
            assert wrapper._paged_kv_indices_buf[: len(pages)].tolist() == pages
            captured = served.backend._captured
            assert captured is not None
            buffers = captured._pages[0]
            assert wrapper._paged_kv_indices_buf.data_ptr() == buffers.indices.data_ptr()


class TestPlansInFlight:
    """Plans go to the device by asynchronous copies from memory that the next plan fills."""

    def steps(self, runtime: cudart.Runtime, count: int) -> int:
        """The device never catches up by itself. Returns how many copies had their source overwritten."""
        served = Served(runtime, PLAIN, 256)
        for i in range(count):
            served.plan([5 + 100 * i, 40 + i], [1, 1])
            served.launch()
        assert runtime.num_copies > 0
        runtime.drain()
        return runtime.num_overwritten

    def test_none_is_overwritten(self, runtime: cudart.Runtime) -> None:
        assert self.steps(runtime, 6) == 0

    def test_without_events_they_would_be(self, runtime: cudart.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cudart.Event, "synchronize", lambda event: None)
        assert self.steps(runtime, 6) > 0


@pytest.mark.parametrize("num_heads", [8, 32, 64])
@pytest.mark.parametrize(("num_seqs", "length"), [(1, 131_072), (256, 8_192), (1_024, 500)])
def test_the_workspace_is_large_enough(runtime: cudart.Runtime, num_heads: int, num_seqs: int, length: int) -> None:
    """For sums of parts of sequences, which the planner refuses if they do not fit."""
    shape = Shape(num_heads, 8, SIZE, BLOCK, dtype="bfloat16")
    served = Served(runtime, shape, 1)
    served.layer.kv_cache = None
    served.plan([length - 1] * num_seqs, [1] * num_seqs)
    served.plan([length - 512, *([length - 1] * (num_seqs - 1))], [512, *([1] * (num_seqs - 1))])
