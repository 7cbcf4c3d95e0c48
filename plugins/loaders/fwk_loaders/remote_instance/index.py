"""What the seed says of its weights, checked: nothing of it is trusted to fit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fwk_loaders._common.bits import BITS
from fwk_loaders.remote_instance.connection import Seed

PATH = "/remote_instance_weights"
VERSION = 1
MAX_BYTES = 64 * 2**20
MAX_NAME = 1024
MAX_DIMENSIONS = 8
MAX_TENSOR_BYTES = 2**44

_IDENTITY = re.compile(r"[0-9a-f]{32}")

_MAY_DIFFER = frozenset(
    {
        "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map", "eos_token_id",
        "bos_token_id", "pad_token_id",
    }
)  # fmt: skip
"""Keys of config.json that say nothing of what weights mean."""


@dataclass(frozen=True, slots=True)
class RemoteTensor:
    """A tensor that the seed has. dtype: in safetensors' words."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Index:
    """The seed's weights. identity: of these, and no others; the seed keeps to it, or refuses."""

    identity: str
    config: Mapping[str, Any]
    tensors: Mapping[str, RemoteTensor]


def fetch_index(seed: Seed) -> Index:
    """Raises ``ModelLoadError``."""
    told = seed.json(PATH, MAX_BYTES)
    try:
        return _index(told)
    except _WrongError as error:
        raise seed.refusal(f"tells of its weights what cannot be: {error}") from None


class _WrongError(Exception):
    """What is wrong."""


def _index(told: object) -> Index:
    if not isinstance(told, dict):
        raise _WrongError("no JSON object")
    found = cast("dict[str, Any]", told)
    if found.get("version") != VERSION:
        raise _WrongError(
            f"version {str(found.get('version'))[:20]!r} of the protocol, not {VERSION}: use the same fwk"
        )
    identity, config, tensors = found.get("identity"), found.get("config"), found.get("tensors")
    if not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
        raise _WrongError("no identity")
    if not isinstance(config, dict) or not isinstance(tensors, dict) or not tensors:
        raise _WrongError("no config or no tensors")
    named = cast("dict[str, Any]", tensors)
    return Index(identity, cast("dict[str, Any]", config), {name: _tensor(name, item) for name, item in named.items()})


def _tensor(name: str, item: object) -> RemoteTensor:
    if not 0 < len(name) <= MAX_NAME or not isinstance(item, list) or len(cast("list[Any]", item)) != 2:
        raise _WrongError(f"tensor {name[:80]!r}")
    dtype, shape = cast("list[Any]", item)
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _WrongError(f"tensor {name[:80]!r} is of the type {str(dtype)[:20]!r}")
    if not isinstance(shape, list) or len(cast("list[Any]", shape)) > MAX_DIMENSIONS:
        raise _WrongError(f"tensor {name[:80]!r} has no shape")
    sizes = cast("list[Any]", shape)
    if any(type(size) is not int or not 0 <= size <= MAX_TENSOR_BYTES for size in sizes):
        raise _WrongError(f"tensor {name[:80]!r} has the shape {str(sizes)[:80]}")
    num_bits = math.prod(sizes) * BITS[dtype]
    if num_bits % 8 or num_bits > 8 * MAX_TENSOR_BYTES:
        raise _WrongError(f"tensor {name[:80]!r} has the shape {str(sizes)[:80]}")
    return RemoteTensor(dtype, tuple(sizes), num_bits // 8)


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> str | None:
    """How a config.json tells of another model than the seed's, in words; None where it does not.

    Programs write more or fewer defaults, so only what both have is compared, and how weights are quantised.
    """
    keys = (mine.keys() & theirs.keys()) | ({"quantization_config"} & (mine.keys() | theirs.keys()))
    for key in sorted(keys - _MAY_DIFFER):
        one, other = mine.get(key), theirs.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            inner = difference(cast("Mapping[str, Any]", one), cast("Mapping[str, Any]", other), f"{prefix}{key}.")
            if inner is not None:
                return inner
        elif one != other:
            return f"{prefix}{key} is {str(one)[:80]} here and {str(other)[:80]} there"
    return None
