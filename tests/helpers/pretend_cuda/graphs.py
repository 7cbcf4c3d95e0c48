"""Graphs of the pretended device: what was launched while one is captured, launched again on the same memory.

As on a device, nothing in Python runs again, and what a kernel was given as a number stays that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from fwk.interfaces.graphs import Cut, Graph, GraphCapture, NotCapturable, StepOutput, StepSize
from fwk.worker.runner.rehearsal import LargestStep
from tests.helpers.pretend_cuda import tensors
from tests.helpers.pretend_cuda.tensors import JOURNAL, inner, outer


class Recorded(Graph):
    """One size."""

    def __init__(self, nodes: list[Callable[[], None]], output: StepOutput, size: StepSize) -> None:
        self.nodes, self.output, self.size = nodes, output, size

    def replay(self, size: StepSize) -> StepOutput:
        assert size == self.size, f"a graph of {self.size} replayed for {size}"
        JOURNAL.launch("graph")
        for node in self.nodes:
            node()
        return self.output


class Recording(GraphCapture):
    """Captures as ``torch.cuda.graph`` does; what makes the host wait, or copies from its memory, cannot be."""

    serves_smaller = False

    def capture(self, step: Callable[[StepSize], StepOutput], most: StepSize) -> Graph:
        step(most)
        tensors.NODES = []
        try:
            output = step(most)
            return Recorded(tensors.NODES, output, most)
        except tensors.WhileCapturing as error:
            raise NotCapturable(str(error)) from error
        finally:
            tensors.NODES = None

    def capture_pieces(self, step: Callable[[Cut | None], Tensor]) -> tuple[list[Callable[[], None]], Tensor]:
        step(None)
        pieces: list[list[Callable[[], None]]] = []

        def cut() -> None:
            tensors.NODES = []
            pieces.append(tensors.NODES)

        cut()
        try:
            output = step(cut)
        except tensors.WhileCapturing as error:
            raise NotCapturable(str(error)) from error
        finally:
            tensors.NODES = None
        return [partial(_replay, nodes) for nodes in pieces], output


def _replay(nodes: list[Callable[[], None]]) -> None:
    JOURNAL.launch("graph")
    for node in nodes:
        node()


def kernel(launch: Callable[..., Any], name: str, *arguments: Any, **settings: Any) -> Any:
    """Launch what is no operator of torch's: ``launch`` gets the tensors that hold the numbers, also when replayed."""
    given = tree_map(inner, (arguments, settings))
    JOURNAL.launch(name)
    kept, tensors.NODES = tensors.NODES, None
    try:
        with _disable_current_modes():  # a kernel's own operators are none of the device's
            out = launch(*given[0], **given[1])
    finally:
        tensors.NODES = kept
    if kept is not None:
        kept.append(partial(_again, launch, given, out))
    known = {id(inner(x)): x for x in tree_flatten((arguments, settings))[0]}
    return tree_map(lambda x: known.get(id(x), outer(x)), out)


def _again(launch: Callable[..., Any], given: tuple[Any, Any], out: Any) -> None:
    with _disable_current_modes():
        found = launch(*given[0], **given[1])
    for kept, new in zip(tree_flatten(out)[0], tree_flatten(found)[0], strict=True):
        if isinstance(kept, Tensor) and kept is not new:
            kept.copy_(new)


@contextmanager
def triton_kernels() -> Iterator[None]:
    """Within, kernels of ours run in Triton's interpreter on the pretended device."""
    import fwk_attention.triton_paged.backend as attention
    import fwk_lora.triton_lora.backend as adapters
    import fwk_moe.triton_fused.runner as experts
    import fwk_operators.triton_ops.backend as operators
    import fwk_quant._linear_triton.matrix as packed
    import fwk_quant.none.invariant as products
    import fwk_sampling.triton_sampler.sampler as sampler

    rehearsing = False

    def rehearse(self: LargestStep, *arguments: Any, **settings: Any) -> None:
        nonlocal rehearsing
        rehearsing = True
        try:
            real_rehearse(self, *arguments, **settings)
        finally:
            rehearsing = False

    real_rehearse = LargestStep.rehearse

    def launcher(real: Callable[..., None]) -> Callable[..., None]:
        def run(function: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
            if not rehearsing or real is not attends:
                real(function, grid, *arguments, **constants)
            elif "out" in (names := function.arg_names):  # what attention computes there means nothing
                arguments[names.index("out")].zero_()

        def launch(function: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
            if all(grid):
                kernel(partial(run, function, grid), function.fn.__name__, *arguments, **constants)

        return launch

    attends = attention._launch

    with pytest.MonkeyPatch.context() as patch:
        for module in (adapters, attention, experts, operators, packed, products, sampler):
            patch.setattr(module, "_launch", launcher(module._launch))
        patch.setattr(LargestStep, "rehearse", rehearse)
        yield
