"""Typed access to the metadata of a GGUF file, with errors that name file and key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fwk.errors import ModelLoadError
from fwk_loaders.gguf.reader import GGUFFile, StoredArray


class Metadata:
    """The metadata of one file. Keys that start with a dot belong to the architecture (``.block_count``).

    read: the full names of those whose values were asked for.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.read: set[str] = set()
        self.architecture = self.string("general.architecture")

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int = 2**31 - 1) -> int:
        """A whole number from ``low`` to ``high``; required when there is no default."""
        value = self._get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}", value)
        return value

    def per_layer(self, key: str, count: int, default: int | None = None, high: int = 2**31 - 1) -> list[int]:
        """Whole numbers from 0 to ``high``, one for each of ``count`` layers; a single one is that of all layers."""
        value = self._get(key, default)
        if not isinstance(value, StoredArray):
            return [self.integer(key, default, high=high)] * count
        found = self.file.numbers(self._full(key))[:count]
        if len(found) < count or not all(type(number) is int and 0 <= number <= high for number in found):
            raise self.wrong(key, f"{count} whole numbers from 0 to {high}", found)
        return found

    def flags(self, key: str, count: int) -> list[bool] | None:
        """A boolean for each of ``count`` layers; None where the file holds no list."""
        if not isinstance(self.file.metadata.get(self._full(key)), StoredArray):
            return None
        self.read.add(self._full(key))
        found = [bool(x) for x in self.file.numbers(self._full(key))[:count]]
        if len(found) < count:
            raise self.wrong(key, f"a value for each of {count} layers", found)
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. float32 values become the shortest decimal that stands for them (1e-05)."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.wrong(key, "a finite number", value)
        narrow = np.float32(value) if abs(value) < 3e38 else np.float32("inf")
        return float(str(narrow)) if float(narrow) == value else float(value)

    def string(self, key: str, default: str | None = None) -> str:
        """Text."""
        value = self._get(key, default)
        if type(value) is not str:
            raise self.wrong(key, "text", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false", value)
        return value

    def has(self, key: str) -> bool:
        """Whether the file holds this key."""
        return self._full(key) in self.file.metadata

    def wrong(self, key: str, expected: str, value: object) -> ModelLoadError:
        """The error for a value that cannot be used."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        return ModelLoadError(f"{self.file.path}: {self._full(key)} must be {expected}, not {shown}")

    def _get(self, key: str, default: Any) -> Any:
        full = self._full(key)
        self.read.add(full)
        value = self.file.metadata.get(full, default)
        if value is None:
            raise ModelLoadError(f"{self.file.path}: {full} is missing; the file was converted incompletely")
        return value

    def _full(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key
