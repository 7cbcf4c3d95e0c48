"""Python's collections of garbage, while there is next to none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect nothing meanwhile, and never look at what was made meanwhile again.

    For imports and the building of what stays: hundreds of thousands of objects, of which 7,000 are garbage when torch
    is imported, and which hundreds of collections look at. Afterwards collections are as they were before.
    """
    were_made = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if were_made:
            gc.enable()
