"""Embeddings of fewer numbers than the model makes."""

from __future__ import annotations

import numpy as np

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import ModelCard


def check_dimensions(dimensions: int | None, card: ModelCard) -> None:
    """Vectors can be cut where the model was made for it (Kusupati et al. 2022, arXiv:2205.13147)."""
    size = card.embedding_size
    if dimensions in (None, size):
        return
    sizes = card.config.get("matryoshka_dimensions")
    if not sizes and not card.config.get("is_matryoshka"):
        raise InvalidRequest(
            f"dimensions must be {size}: this model's embeddings are not made to be cut (its config.json has neither "
            "is_matryoshka nor matryoshka_dimensions)",
            "dimensions",
        )
    if dimensions not in (sizes or range(1, size + 1)):
        allowed = " or ".join(map(str, sizes)) if sizes else f"1 to {size}"
        raise InvalidRequest(f"dimensions must be {allowed}, not {dimensions}", "dimensions")


def cut(vector: bytes, dimensions: int | None) -> bytes:
    """The first numbers of a vector, with length one again."""
    if dimensions is None or 4 * dimensions == len(vector):
        return vector
    numbers = np.frombuffer(vector, "<f4")[:dimensions]
    return (numbers / max(float(np.linalg.norm(numbers)), 1e-12)).astype("<f4").tobytes()
