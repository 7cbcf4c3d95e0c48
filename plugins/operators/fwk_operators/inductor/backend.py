"""Compiles operators as they are first called while a run warms up, and runs them in small steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from fwk.errors import ConfigError
from fwk.interfaces.operators import OperatorContext
from fwk_layers import activation as activation_named
from fwk_operators._common.torch_operators import TorchOperators
from fwk_operators.inductor import compiling
from fwk_operators.inductor.compiling import Layout, Signature, compiled

log = logging.getLogger(__name__)


class InductorOperators(TorchOperators):
    """Torch's, but in steps of up to ``torch_compile_max_bs`` rows norms, rotations and gates are compiled ones.

    So a row's numbers may differ by rounding between steps of more and of fewer rows than that.
    """

    compiles: ClassVar[bool] = True

    def __init__(self, context: OperatorContext) -> None:
        super().__init__(context)
        self._max_rows: int = context.options.torch_compile_max_bs
        self._made: dict[Signature, Callable[..., Any] | None] = {}
        self._signatures: set[Signature] = set()
        self._is_ready = False
        self._seconds = 0.0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False) -> Tensor:
        run = self._find(compiling.rms_norm, (eps, rounds_last), (x,), weight)
        return super().rms_norm(x, weight, eps, rounds_last=rounds_last) if run is None else run(x, weight)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False
    ) -> Tensor:
        run = self._find(compiling.add_rms_norm, (eps, rounds_last), (x, residual), weight)
        if run is None:  # not by way of rms_norm, which would compile that, too
            return super().rms_norm(residual.add_(x), weight, eps, rounds_last=rounds_last)
        return run(x, residual, weight)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        run = self._find(compiling.rotate, (), (x, cos, sin))
        if run is None:
            super().rotate(x, cos, sin)
        else:
            run(x, cos, sin)

    def gate(self, x: Tensor, activation: str) -> Tensor:
        run = self._find(compiling.gate, (activation_named(activation),), (x,))
        return super().gate(x, activation) if run is None else run(x)

    def ready(self) -> str:
        self._is_ready = True
        if not self._signatures:
            raise ConfigError(
                "--enable-torch-compile (operators inductor): this model calls none of the operators that are "
                "compiled, which are RMS norms, rotations of queries and keys, and gates: leave it out"
            )
        log.info("torch.compile made %d kernels in %.1f s", len(self._signatures), self._seconds)
        names = ", ".join(dict.fromkeys(sorted(signature.function.__name__ for signature in self._signatures)))
        return f"{names} in steps of up to {self._max_rows} rows"

    def _find(
        self, function: Callable[..., Any], constants: tuple[Any, ...], rows: tuple[Tensor, ...], *others: Tensor
    ) -> Callable[..., Any] | None:
        """The compiled function for these arguments; None where torch's own is to be called.

        rows: the tensors that have a row for each row of the step. Before ``ready`` it is compiled for
        any number.
        """
        count = len(rows[0])
        if not count or (self._is_ready and count > self._max_rows):
            return None
        layouts = [_with_rows(x, count) for x in rows]
        signature = Signature(function, constants, (*layouts, *(_whole(x) for x in others)))
        try:
            found = self._made[signature]
        except KeyError:
            found = self._make(signature, rows, count)
        return found if count <= self._max_rows else None

    def _make(self, signature: Signature, rows: tuple[Tensor, ...], count: int) -> Callable[..., Any] | None:
        if self._is_ready:
            log.warning("%s is not compiled: no step called it so while this run warmed up", signature)
            self._made[signature] = None
            return None
        if not self._made:
            log.info("torch.compile is making operators; what it made before is in its cache")
        own = [_apart(x, layout) for x, layout in zip(rows, signature.layouts, strict=False)]
        exact = signature._replace(layouts=(*own, *signature.layouts[len(rows) :]))
        started = time.perf_counter()
        try:
            made = compiled(exact, self._max_rows, self.context.device, self.context.threads.size)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"--enable-torch-compile (operators inductor): torch.compile cannot make {exact} "
                f"({type(error).__name__}: {reason}): leave it out"
            ) from error
        self._seconds += time.perf_counter() - started
        self._signatures.add(exact)
        alone = [layout._replace(strides=layout.strides[1:]) for layout in own]
        for layouts in (own, alone):
            self._made[exact._replace(layouts=(*layouts, *exact.layouts[len(rows) :]))] = made
        return made


def _with_rows(x: Tensor, count: int) -> Layout:
    """How a tensor with a row for each of the step's is laid out: how far rows are apart says nothing of one alone."""
    strides = x.stride()
    return Layout((-1, *x.shape[1:]), strides if count > 1 else strides[1:], x.dtype)


def _apart(x: Tensor, layout: Layout) -> Layout:
    """The same, with a distance between rows where there is one row alone."""
    if len(layout.strides) == len(layout.shape):
        return layout
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape[1:], layout.strides, strict=True))
    return layout._replace(strides=(max(x.stride(0), size), *layout.strides))


def _whole(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.dtype)
