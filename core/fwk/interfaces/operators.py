"""The small operators between a model's matrices and its attention: norms, rotary positions, gates, rows of a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration, Facts
from fwk.interfaces.native import NO_THREADS, NativeThreads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fwk.interfaces.graphs import GraphCapture
    from fwk.interfaces.moe import Routing
    from fwk.interfaces.quant import RoundedRows


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """What operators are built with. ``threads`` runs native ones.

    - ``device``: the worker's.
    - ``dtype``: of activations
    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    device: torch.device
    dtype: torch.dtype
    options: Any = None
    threads: NativeThreads = NO_THREADS


class Operators(ABC):
    """One per worker; holds no state. A row's outcome depends on no other row.

    Tensors named ``x`` may be views whose rows (with heads: the heads' rows) stand apart; a row's numbers lie together.
    Where it is said that a number is rounded, it becomes one of ``x``'s dtype; all else is computed in float32.

    - ``compiles``: whether first calls take so long that no request is to wait for one: steps of all kinds then run
      before any.
    - ``rounds``: whether it has ``add_rms_norm_rounded`` and ``gate_rounded``.
    """

    compiles: ClassVar[bool] = False

    rounds: ClassVar[bool] = False

    def __init__(self, context: OperatorContext) -> None:
        self.context = context

    def ready(self) -> str:
        """What these operators made for the run (`compiled` at /server_info); empty: nothing.

        Called once, before the first request; where it ``compiles``, after steps of all kinds. Raises ``ConfigError``
        where that came to nothing that the run asked for.
        """
        return ""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False) -> Tensor:
        """x / sqrt(mean(x ** 2) + eps) over the last dimension, rounded, times the weight: a new tensor of x's shape.

        x: [num_tokens, size], weight [size]; or [num_tokens, num_heads, size], weight [num_heads, size] or [size].
        rounds_last: it is rounded only after it was multiplied; the weight is float32 then, else of x's dtype.
        """

    @abstractmethod
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False
    ) -> Tensor:
        """Add ``x`` to ``residual`` in place, rounded, and return what ``rms_norm`` makes of the sum.

        x, residual: [num_tokens, size] each; x is unchanged.
        """

    def add_rms_norm_rounded(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, group: int, *, rounds_last: bool = False
    ) -> RoundedRows:
        """``add_rms_norm``, or without a residual ``rms_norm``, whose outcome is then rounded to e4m3.

        x: [num_tokens, size]. Every ``group`` numbers of a row have a scale: their largest / 448, at least 1e-12;
        infinite where one is infinite or no number.
        """
        raise NotImplementedError(f"{type(self).__name__} rounds nothing")

    @abstractmethod
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turn the first ``size`` numbers of every head in place: x * cos + swapped(x) * sin, the halves swapped.

        x: [num_tokens, num_heads, head_size]; cos, sin: [num_tokens, 1, size] of x's dtype, size <= head_size, sin's
        first half negated. The first product is rounded.
        """

    @abstractmethod
    def gate(self, x: Tensor, activation: str) -> Tensor:
        """activation(first half of each row), rounded, times the second half: [n, 2 * size] to [n, size].

        activation: as config.json names it; ``fwk_layers.activation`` knows all that there are.
        """

    def gate_rounded(self, x: Tensor, activation: str, group: int) -> RoundedRows:
        """``gate`` of x, [n, 2 * size], whose outcome is then rounded to e4m3 (``add_rms_norm_rounded``)."""
        raise NotImplementedError(f"{type(self).__name__} rounds nothing")

    @abstractmethod
    def rows(self, table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
        """The rows of ``table`` [num_rows, ...] at ``indices`` [n] int64, all in range: a copy, times ``scale``."""

    def scale(self, x: Tensor, factor: float) -> None:
        """Multiply x [n, size] in place, rounded."""
        x.mul_(factor)

    def choose_experts(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """``routing.choose``: a router's logits [num_tokens, num_experts] to ids and float32 weights of the best."""
        return routing.choose(logits, correction)

    def graph_capture(self) -> GraphCapture | None:
        """How steps made of these operators are captured; None where each is computed operator by operator."""
        return None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Contiguous tensors [n, size of each] of one dtype side by side in a new one."""
        import torch  # noqa: PLC0415 - declarations import this module, and are light

        return torch.cat(list(parts), -1)


@dataclass(frozen=True, kw_only=True)
class OperatorsSpec(Declaration):
    """Declares operators (``--operator-backend``).

    - ``dtypes``: of activations that they compute in.
    """

    family: ClassVar[str] = "operators"

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")

    def refusal(self, facts: Facts) -> str | None:
        if facts.dtype not in self.dtypes:
            return f"computes in {', '.join(self.dtypes)}, this run in {facts.dtype}"
        return super().refusal(facts)
