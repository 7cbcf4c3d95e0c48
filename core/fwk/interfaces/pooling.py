"""How a model's hidden states become vectors: what checkpoints and model plugins say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a model's hidden states become one vector: their mean, or the first (``cls``) or ``last`` token's.

    ``token`` keeps a vector of each token (late interaction: Khattab and Zaharia 2020, arXiv:2004.12832).
    ``max_length`` is the longest input the model was made for, in tokens, where that is less than its positions.

    - ``kind``: as above.
    - ``normalize``: to length 1.
    """

    kind: Literal["mean", "cls", "last", "token"] = "mean"
    normalize: bool = False
    max_length: int | None = None
