"""How many prepared kernels the libraries under torch keep."""

from __future__ import annotations

from collections.abc import MutableMapping

NUM_KERNELS = "64"
"""For oneDNN and for torch's own cache before it, each of which keeps 1,024 when left alone.

They prepare a kernel for every shape they meet, and every prompt length, chunk and batch size is a new shape: about
200 KB each, so a server grew for hours until both were full. What is used again, the shapes of decoding, are six or so
for each batch size.
"""


def bound_kernel_caches(environment: MutableMapping[str, str]) -> None:
    """Set the variables before torch is imported; a user's own choice stands."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        environment.setdefault(name, NUM_KERNELS)
