"""What a model's weights will take, said before they are read, and refused where it cannot fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fwk.errors import ConfigError
from fwk.interfaces.quant import PACKED, PLAIN, QuantizerSpec
from fwk.setup.resolve import ModelSetup
from fwk_process.memory_limits import available_memory

log = logging.getLogger(__name__)

WORKING_BYTES = 500 << 20
"""Of an engine besides: libraries, buffers, and what packing needs meanwhile."""


def estimate(sizes: Mapping[str, tuple[int, int]], spec: QuantizerSpec, itemsize: int) -> int:
    """Bytes of all weights as ``spec`` keeps them. sizes: ``WeightSource.stored_sizes``. itemsize: of the run's dtype.

    Blocks that the quantizer does not read become numbers of the run's dtype.
    """
    total = 0.0
    for layout, (numbers, size) in sizes.items():
        is_kept = layout == PACKED or layout in spec.layouts
        if layout != PLAIN and is_kept:
            total += size
        else:
            total += numbers * (itemsize if spec.bits is None else spec.bits / 8)
    return int(total)


def check(
    setup: ModelSetup, sizes: Mapping[str, tuple[int, int]], itemsize: int, num_ranks: int, cache_bytes: int = 0
) -> None:
    """Say what the engine's weights will take. Raises ``ConfigError`` with the numbers where they cannot fit.

    cache_bytes: what else it may keep. Only a model on a CPU whose sizes are known; a GPU's memory is its
    own matter.
    """
    if not sizes or not setup.device.is_host:
        return
    spec = setup.factory.item("quant").declaration
    assert isinstance(spec, QuantizerSpec)
    need = estimate(sizes, spec, itemsize) // num_ranks
    free = available_memory()
    log.info("weights will take about %s of the %s of memory that are free", _gib(need), _gib(free))
    besides = WORKING_BYTES + cache_bytes
    if need + besides > free:
        raise ConfigError(
            f"{setup.opened.name} needs about {_gib(need)} for its weights and {_gib(besides)} besides, but "
            f"{_gib(free)} of memory are free: {_remedy(sizes, spec)}"
        )


def _remedy(sizes: Mapping[str, tuple[int, int]], spec: QuantizerSpec) -> str:
    numbers = sum(count for layout, (count, _) in sizes.items() if layout == PLAIN)
    if spec.bits is None and numbers * 2 > sum(size for _, size in sizes.values()) // 2:
        return f"in 8 bits (--quantization) it takes about {_gib(numbers)}, in 4 about {_gib(int(numbers * 4.5 / 8))}"
    return "take a smaller model, or one in fewer bits"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
