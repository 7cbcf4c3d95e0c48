"""The part in each worker."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from fwk.errors import ConfigError
from fwk.interfaces.feature import WorkerPart, WorkerPartContext

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
    from torch.profiler import profile  # noqa: PLC0415 - few runs take one

    with profile(record_shapes=True) as taken:
        yield
    averages = taken.key_averages(group_by_input_shape=True)
    orders = ["self_cpu_time_total"]
    if any(event.self_device_time_total for event in averages):
        orders.append("self_device_time_total")
    for order in orders:
        log.info("capturing steps, by %s:\n%s", order, averages.table(sort_by=order, row_limit=_ROWS))


class AroundCaptures(WorkerPart):
    """Has no part in sequences."""

    def __init__(self, context: WorkerPartContext) -> None:
        """Raises ``ConfigError`` for options that would do nothing on the host itself."""
        super().__init__(context)
        for name in context.options.given() if context.is_host else ():
            raise ConfigError(f"{name}: on this device one capture serves steps of all sizes; leave it out")

    @contextmanager
    def around_captures(self) -> Iterator[None]:
        """Both, as the options ask."""
        options = self.context.options
        with (
            collected_garbage() if options.enable_cudagraph_gc else frozen_garbage(),
            logged_profile() if options.enable_profile_cuda_graph else nullcontext(),
        ):
            yield
