"""The ``cpu`` backend: every instruction set this machine runs, threads, odd shapes, and machines without a compiler.

What every backend must do is in tests/contracts/test_attention.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.batches import block_tables, make_batch

from fwk import native
from fwk.errors import PluginError
from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from fwk.interfaces.declaration import Facts
from fwk.plugins import choose, discover, load_object

PLUGINS = discover()

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name: str, dtype: torch.dtype, block_size: int = 16) -> AttentionBackend:
    item = PLUGINS.by_family["attention"][name]
    return load_object(item)(AttentionContext(torch.device("cpu"), dtype, "auto", block_size))


@dataclasses.dataclass
class Case:
    """One step after filled pasts; layers are numbered so that plans are shared as in a model."""

    pasts: list[int]
    num_new: list[int]
    heads: tuple[int, int] = (6, 2)
    size: int = 32
    block_size: int = 16
    window: int | None = None
    cap: float | None = None
    parents: list[list[int] | None] | None = None
    dtype: torch.dtype = torch.float32

    def run(self, name: str) -> torch.Tensor:
        backend = build(name, self.dtype, self.block_size)
        heads, kv_heads = self.heads
        layer = AttentionLayer(0, heads, kv_heads, self.size, self.size**-0.5, self.window, self.cap)
        form = backend.block_format(layer.kv_spec)
        lens = [p + n for p, n in zip(self.pasts, self.num_new, strict=True)]
        tables = block_tables(lens, self.block_size)
        random = torch.Generator().manual_seed(5)
        cache = torch.randn(sum(map(len, tables)) + 1, *form.block_shape, generator=random).to(form.dtype)
        layer.kv_cache = cache
        count = sum(self.num_new)
        q, k, v = (torch.randn(count, h, self.size, generator=random).to(self.dtype) for h in (heads, *[kv_heads] * 2))
        batch = make_batch(self.pasts, self.num_new, tables, block_size=self.block_size, parents=self.parents)
        batch.plan = backend.plan(batch, [layer])
        return backend.forward(q, k, v, layer, batch).float()


CASES = {
    "mixed": Case([0, 33, 700, 15, 1100], [70, 1, 3, 65, 1]),
    "odd head size": Case([20, 90, 0], [1, 5, 33], size=13),
    "large heads": Case([200, 0], [1, 40], (4, 1), 160),
    "block of 7, window, cap": Case([300, 5, 640], [40, 1, 1], block_size=7, window=75, cap=20.0),
    "tree": Case([60, 600, 3], [4, 3, 1], parents=[[-1, -1, 0, 1], [-1, 0, 0], None], window=50),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isa", native.isas())
def test_instruction_sets_agree_with_torch(
    isa: str, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    exact = dataclasses.replace(CASES[case], dtype=dtype)
    torch.testing.assert_close(exact.run("cpu"), exact.run("torch"), atol=TOLERANCE[dtype], rtol=0.008)


def test_threads_change_no_bit() -> None:
    """A sequence's outcome is the same with any number of threads, in whatever order they take tasks."""
    case = Case([1500, 40, 0, 2100], [1, 1, 90, 2], dtype=torch.bfloat16)
    alone = case.run("cpu")
    torch.set_num_threads(4)
    try:
        for _ in range(5):
            assert torch.equal(case.run("cpu"), alone)
    finally:
        torch.set_num_threads(1)


def test_ranges_of_keys_cover_each_once() -> None:
    from fwk_attention.cpu.plan import LayerKind, _tasks

    pasts, num_new = [0, 511, 512, 1300, 90], [1, 1, 1, 3, 700]
    batch = make_batch(pasts, num_new, block_tables([p + n for p, n in zip(pasts, num_new, strict=True)]))
    for window in (None, 100, 600):
        tasks, num_parts, part_rows, _ = _tasks(LayerKind(0, 9, 3, 64, window), batch)
        assert sorted(tasks["part"][tasks["part"] >= 0]) == list(range(num_parts))
        assert part_rows == max(tasks["count"][tasks["part"] >= 0], default=0) * 3
        for i in range(len(pasts)):
            mine = tasks[tasks["seq"] == i]
            for start in np.unique(mine["first"]):
                of = mine[mine["first"] == start]
                place, count = int(of["place"][0]), int(of["count"][0])
                first = 0 if window is None else max(0, place - window + 1)
                keys = np.concatenate([np.arange(t["first_key"], t["last_key"]) for t in of])
                assert keys.tolist() == list(range(first, place + count))
                assert (of["num_parts"] == len(of)).all()


def test_wrong_dtype_is_refused() -> None:
    case = Case([3], [1])
    backend = build("cpu", torch.bfloat16)
    layer = AttentionLayer(0, 6, 2, 32, 1.0)
    layer.kv_cache = torch.zeros(4, *backend.block_format(layer.kv_spec).block_shape, dtype=torch.bfloat16)
    batch = make_batch(case.pasts, case.num_new, block_tables([4]))
    batch.plan = backend.plan(batch, [layer])
    q, k = torch.zeros(1, 6, 32), torch.zeros(1, 2, 32)
    with pytest.raises(TypeError, match=r"bfloat16 was given torch\.float32"):
        backend.forward(q, k, k, layer, batch)


def test_auto_takes_it_on_a_cpu_and_torch_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(dtype="bfloat16", head_size=64, num_heads=9, num_kv_heads=3)
    selection = choose(PLUGINS, "attention", "auto", facts)
    assert selection.chosen is not None
    assert selection.chosen.name == "cpu"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    selection = choose(PLUGINS, "attention", "auto", facts)
    assert selection.chosen is not None
    assert selection.chosen.name == "torch"
    (reason,) = [r for r in selection.reasons() if "'cpu'" in r]
    assert "finds no C++ compiler" in reason
    with pytest.raises(PluginError, match=r"'cpu' .*cannot be used: it is built on first use and finds no C\+\+"):
        choose(PLUGINS, "attention", "cpu", facts)
