"""Packed matrices as tensors that outlive a process, and back."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

import fwk_native as native
from fwk.interfaces.weights_cache import PackedTensors
from fwk_quant._linear_cpu.kernel import Header, PackedMatrix

ADDRESSES = ("words", "scales", "zeros", "scale_bytes", "zero_bytes", "exponents", "rare_starts", "rare")
"""The fields of ``Header`` that point into the matrix's tensors."""

PACKAGE = Path(__file__).parents[1]


@functools.cache
def layout_version() -> str:
    """What the panels' layout depends on: the instruction set, and all sources that read weights and pack them."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(PACKAGE.rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{native.isa()} {digest.hexdigest()}"


def to_packed(matrices: list[PackedMatrix]) -> PackedTensors:
    """All of a layer's matrices."""
    tensors: dict[str, torch.Tensor] = {}
    facts: list[dict[str, Any]] = []
    for number, matrix in enumerate(matrices):
        held = [matrix.words, *matrix.scales]
        places = {x.data_ptr(): i for i, x in enumerate(held) if x.numel()}
        tensors.update({f"{number}.{i}": x for i, x in enumerate(held)})
        if matrix.inputs is not None:
            tensors[f"{number}.inputs"] = matrix.inputs
        fields: dict[str, Any] = {field[0]: getattr(matrix.header, field[0]) for field in Header._fields_}
        facts.append(
            {
                "size": list(matrix.size),
                "dtypes": [str(dtype).removeprefix("torch.") for dtype in matrix.dtypes],
                "count": len(held),
                "places": {name: places[fields[name]] for name in ADDRESSES if fields[name] in places},
                "numbers": {name: value for name, value in fields.items() if name not in ADDRESSES},
            }
        )
    return PackedTensors(tensors, {"matrices": facts})


def from_packed(packed: PackedTensors) -> list[PackedMatrix]:
    """What ``to_packed`` was given."""
    return [_matrix(packed, number, facts) for number, facts in enumerate(packed.facts["matrices"])]


def _matrix(packed: PackedTensors, number: int, facts: dict[str, Any]) -> PackedMatrix:
    held = [packed.tensors[f"{number}.{i}"] for i in range(facts["count"])]
    header = Header(**facts["numbers"])
    for name, place in facts["places"].items():
        setattr(header, name, held[place].data_ptr())
    dtypes = tuple(getattr(torch, name) for name in facts["dtypes"])
    rows, columns = facts["size"]
    inputs = packed.tensors.get(f"{number}.inputs")
    return PackedMatrix(held[0], (rows, columns), dtypes, header, tuple(held[1:]), inputs)
