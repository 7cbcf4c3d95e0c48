"""torch.cuda's graphs without a device: which stream is current, and what the allocator believes to be captured."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class FakeStream:
    def __init__(self, owner: FakeGraphs) -> None:
        self.owner = owner

    def wait_stream(self, other: FakeStream) -> None:
        self.owner.calls.append("own waits" if self is self.owner.own else "current waits")


class FakeGraph:
    def __init__(self, owner: FakeGraphs) -> None:
        self.owner = owner

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        owner = self.owner
        assert (pool, capture_error_mode, owner.streams[-1]) == ("pool", "thread_local", owner.own)
        owner.under_way, owner.num_users = owner.under_way + 1, owner.num_users + 1
        if owner.refuses_to_begin:
            raise RuntimeError("CUDA error: capture cannot begin")
        owner.calls.append("begin")

    def capture_end(self) -> None:
        owner = self.owner
        assert owner.streams[-1] is owner.own
        if owner.is_spoiled or not owner.under_way:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        owner.under_way -= 1
        owner.calls.append("end")

    def replay(self) -> None:
        self.owner.calls.append("replay")


class FakeGraphs:
    """torch.cuda's graphs and their pool, as its sources have them, in the order they were used.

    A capture that was spoiled ends with an error of its own, before the allocator is told that it ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = inspect.signature(torch.cuda.CUDAGraph.capture_begin)
        assert [*real.parameters][1:3] == ["pool", "capture_error_mode"]
        self.calls: list[str] = []
        self.streams: list[FakeStream] = []
        """Whose turn it is, the innermost last."""
        self.is_spoiled = self.refuses_to_begin = False
        self.under_way = self.num_users = 0
        self.current, self.own = FakeStream(self), FakeStream(self)
        fakes = {
            "Stream": lambda: self.own,
            "CUDAGraph": lambda: FakeGraph(self),
            "stream": self.on,
            "current_stream": lambda: self.streams[-1] if self.streams else self.current,
            "current_device": lambda: 0,
            "graph_pool_handle": lambda: "pool",
            "synchronize": lambda: None,
            "empty_cache": self.empty_cache,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", self.end_pool)
        monkeypatch.setattr(torch.cuda.memory, "_cuda_releasePool", self.release_pool)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    def end_pool(self, device: int, pool: str) -> None:
        if not self.under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.under_way -= 1

    def release_pool(self, device: int, pool: str) -> None:
        self.num_users -= 1

    def empty_cache(self) -> None:
        assert not self.under_way, "captures_underway.empty() INTERNAL ASSERT FAILED"

    @property
    def is_capturing(self) -> bool:
        return bool(self.under_way)

    def is_as_before(self) -> bool:
        """Whether nothing of a capture is left, so that the next step can be computed eagerly."""
        self.empty_cache()
        return torch.cuda.current_stream() is self.current and not self.num_users
