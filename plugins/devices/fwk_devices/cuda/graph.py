"""CUDA graphs, one for each size of a step, all in one pool of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from fwk.interfaces.graphs import Cut, Graph, GraphCapture, NotCapturable, StepOutput, StepSize

WARM_UPS = 2
"""Runs before a capture: kernels are compiled and chosen, and libraries take their memory, outside of it."""


class CudaGraph(Graph):
    """A captured step, whose outcome lies in the pool until a graph of the same pool is replayed."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: StepOutput) -> None:
        self._graph = graph
        self._output = output

    def replay(self, size: StepSize) -> StepOutput:
        self._graph.replay()
        return self._output


class CudaCapture(GraphCapture):
    """Captures on a stream of its own, which the current one waits for."""

    serves_smaller = False

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[StepSize], StepOutput], most: StepSize) -> Graph:
        self._warm_up(lambda: step(most))
        with self._capturing(f"a step of {most.num_seqs} sequences") as graphs:
            output = step(most)
        return CudaGraph(graphs.made[0], output)

    def capture_pieces(self, step: Callable[[Cut | None], Tensor]) -> tuple[list[Callable[[], None]], Tensor]:
        self._warm_up(lambda: step(None))
        with self._capturing("a piece of a step") as graphs:
            output = step(graphs.cut)
        return [graph.replay for graph in graphs.made], output

    @contextmanager
    def _capturing(self, what: str) -> Iterator[_Graphs]:
        """Within, what is launched goes into a graph. Raises ``NotCapturable`` with the first reason, of ``what``.

        ``torch.cuda.graph`` is not used, as it is no way to fail: the error of ending the capture takes the place of
        the one that spoiled it, the capture's stream stays the current one, and the allocator counts the capture as
        under way, for which it refuses to give memory back (pytorch/pytorch#180395).
        """
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of which a pool has no use, and which cannot be given back during a capture
        graphs = _Graphs(self._pool)
        try:
            with torch.cuda.stream(self._stream), graphs:
                yield graphs
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise NotCapturable(f"{what}: {reason}") from error

    def _warm_up(self, run: Callable[[], object]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self._stream)


class _Graphs:
    """Captured one after another on the current stream, until the context ends. ``made``: the graphs, in order."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.made: list[torch.cuda.CUDAGraph] = []

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._end()
            return
        with suppress(RuntimeError):  # says again that the capture was spoiled, which ``error`` said why
            self._end()

    def cut(self) -> None:
        """End a graph, and begin the next."""
        self._end()
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread's calls may spoil a capture: grammars and downloads continue in others.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
        except RuntimeError:
            self._close_pool()
            raise
        self.made.append(graph)

    def _end(self) -> None:
        try:
            self.made[-1].capture_end()
        except RuntimeError:
            self._close_pool()
            raise

    def _close_pool(self) -> None:
        """Have the allocator take no more for the pool, nor keep it for a graph that there is not."""
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # where torch closed it before it failed
            torch.cuda.memory._cuda_endAllocateToPool(device, self._pool)  # pyright: ignore[reportPrivateImportUsage]
            torch.cuda.memory._cuda_releasePool(device, self._pool)  # pyright: ignore[reportPrivateImportUsage]
