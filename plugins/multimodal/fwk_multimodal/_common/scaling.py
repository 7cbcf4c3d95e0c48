"""From pixels to numbers, as transformers' image processors make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from fwk.errors import ModelLoadError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's training images, which later encoders kept."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """(pixel * factor - mean) / std, by colour."""

    factor: float
    mean: np.ndarray  # [3] float32
    std: np.ndarray  # [3] float32

    @staticmethod
    def of(config: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> Scaling:
        """mean, std: where the config has none."""
        return Scaling(
            factor=float(config.get("rescale_factor", 1 / 255)),
            mean=np.array(config.get("image_mean", mean), np.float32).reshape(3),
            std=np.array(config.get("image_std", std), np.float32).reshape(3),
        )

    def numbers(self, image: Image.Image) -> np.ndarray:
        """[3, height, width] float32: the product in float64, the rest in float32."""
        pixels = (np.asarray(image).astype(np.float64) * self.factor).astype(np.float32)
        return np.ascontiguousarray(((pixels - self.mean) / self.std).transpose(2, 0, 1))


def check_steps(config: Mapping[str, Any], *names: str) -> None:
    """Raise ``ModelLoadError`` for a config that leaves a step out."""
    for name in names:
        if config.get(name, True) is not True:
            raise ModelLoadError(f"preprocessor_config.json: images are read with {name} true only")


@contextmanager
def naming_fields() -> Iterator[None]:
    """What is wrong with a field is a ``ModelLoadError``."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"preprocessor_config.json: {type(error).__name__}: {error}") from None
