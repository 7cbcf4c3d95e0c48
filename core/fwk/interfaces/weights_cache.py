"""Weights as kernels read them, kept from one start to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """One layer's weights: tensors on the CPU, and ``facts`` of numbers, text and lists of them.

    - ``tensors``: by a name of the method's own, of any shape.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


class WeightsCache(ABC):
    """What earlier starts packed. A key names everything that an entry depends on besides the model's files."""

    @abstractmethod
    def find(self, key: str) -> PackedTensors | None:
        """The entry, whose tensors are read-only memory that stays; None when there is none."""

    @abstractmethod
    def store(self, key: str, make: Callable[[], PackedTensors | None]) -> None:
        """Keep what ``make`` returns once the model is built; None is not kept. The tensors are not changed later."""

    def store_at_once(self, key: str, make: Callable[[], PackedTensors | None]) -> None:
        """As ``store``, of what nothing changes while the rest of the model is built: ``make`` may be called now."""
        self.store(key, make)


class NoWeightsCache(WeightsCache):
    """Finds nothing and keeps nothing."""

    def find(self, key: str) -> PackedTensors | None:
        return None

    def store(self, key: str, make: Callable[[], PackedTensors | None]) -> None:
        return None


NO_WEIGHTS_CACHE = NoWeightsCache()
