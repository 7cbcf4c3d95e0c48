"""What is done around capturing a device's steps: Python's garbage collector held, and a profile taken."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch.profiler import profile

log = logging.getLogger(__name__)

_ROWS = 10


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Within, Python's garbage collector looks at no object that was there before: it would look at the whole model.

    Where it is off, as in a server that loads, there is nothing to do.
    """
    if not gc.isenabled():
        yield
        return
    if gc.get_freeze_count():  # those are to stay: freezing more and no less afterwards would keep garbage for ever
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def collected_garbage() -> Iterator[None]:
    """Within, Python's garbage collector works as ever, in a server that loads, too."""
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not was_enabled:
            gc.disable()


@contextmanager
def logged_profile() -> Iterator[None]:
    """Afterwards, the log tells which operators took the host, and a device that torch sees into, most time within."""
    with profile(record_shapes=True) as taken:
        yield
    averages = taken.key_averages(group_by_input_shape=True)
    orders = ["self_cpu_time_total"]
    if any(event.self_device_time_total for event in averages):
        orders.append("self_device_time_total")
    for order in orders:
        log.info("capturing steps, by %s:\n%s", order, averages.table(sort_by=order, row_limit=_ROWS))


@contextmanager
def around_captures(*, collects_garbage: bool, is_profiled: bool) -> Iterator[None]:
    """Both, as the options ask."""
    with (
        collected_garbage() if collects_garbage else frozen_garbage(),
        logged_profile() if is_profiled else nullcontext(),
    ):
        yield
