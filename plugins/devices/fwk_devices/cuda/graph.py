"""CUDA graphs, one for each size of a step, all in one pool of memory."""

from __future__ import annotations

from collections.abc import Callable

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
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread's calls may spoil a capture: grammars and downloads continue in others.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                output = step(most)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise NotCapturable(f"a step of {most.num_seqs} sequences: {reason}") from error
        return CudaGraph(graph, output)

    def capture_pieces(self, step: Callable[[Cut | None], Tensor]) -> tuple[list[Callable[[], None]], Tensor]:
        self._warm_up(lambda: step(None))
        torch.cuda.synchronize()
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        try:
            with torch.cuda.stream(self._stream):
                begin()
                try:
                    output = step(cut)
                finally:
                    graphs[-1].capture_end()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise NotCapturable(f"a piece of a step: {reason}") from error
        return [graph.replay for graph in graphs], output

    def _warm_up(self, run: Callable[[], object]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self._stream)
