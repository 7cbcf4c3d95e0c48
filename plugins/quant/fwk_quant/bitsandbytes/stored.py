"""What transformers writes of layers in the formats of bitsandbytes, a part of a layer at a time.

NF4, FP4   weight [numbers / 2, 1], bytes whatever type they are stored as; weight.absmax, a float32 for each 64 numbers
           of the whole matrix, row by row; weight.quant_map; weight.quant_state.bitsandbytes__KIND, JSON. Scales that
           are quantised themselves ("double quantisation"): weight.absmax in bytes, which name entries of
           weight.nested_quant_map, to be multiplied with weight.nested_absmax, one for each 256 scales, and moved up
           by nested_offset of the JSON.
int8       weight [out_features, in_features] int8; SCB [out_features], each row's largest magnitude; weight_format.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import torch

from fwk.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.loader import WeightSource

BLOCK = 64
"""Numbers with a scale: what transformers and the package take."""

ROW_MAJOR = 0


def int8(weights: WeightSource, prefix: str, size: tuple[int, int]) -> dict[str, Tensor]:
    """``weight`` and ``SCB``. size: out_features and in_features. Raises ``ModelLoadError`` for another arrangement."""
    if weights.has(f"{prefix}.weight_format") and int(weights.raw(f"{prefix}.weight_format")) != ROW_MAJOR:
        raise ModelLoadError(f"{prefix}.weight_format: rows in the tiles of some GPU; save the model again, on a CPU")
    weight, scales = weights.raw(f"{prefix}.weight"), weights.raw(f"{prefix}.SCB")
    if tuple(weight.shape) != size or scales.numel() != size[0] or weight.dtype != torch.int8:
        raise _unlike(f"{prefix}.weight", weight, size)
    return {"weight": weight, "SCB": scales.float().view(-1)}


def four_bit(weights: WeightSource, prefix: str, kind: str, size: tuple[int, int]) -> dict[str, Tensor]:
    """``weight`` [out_features, in_features / 2] uint8 and ``absmax`` [out_features, in_features / 64] float32.

    Raises ``ModelLoadError`` when the tensors do not fit together.
    """
    name, (rows, columns) = f"{prefix}.weight", size
    state = _state(weights.raw(f"{name}.quant_state.bitsandbytes__{kind}"), name)
    weights.skip(f"{name}.quant_map")  # the format's sixteen numbers, which the package knows
    block = int(state.get("blocksize", 0))
    if list(state.get("shape", ())) != [rows, columns]:
        raise ModelLoadError(f"{name}: stored as {state.get('shape')}, but the model needs {[rows, columns]}")
    if block < BLOCK or block % BLOCK or columns % block:
        raise ModelLoadError(
            f"{name}: rows of {columns} numbers in blocks of {block}; fwk reads blocks of {BLOCK} or a multiple, and "
            "whole numbers of them in a row"
        )
    packed = weights.raw(name).contiguous().view(-1).view(torch.uint8)
    if packed.numel() * 2 != rows * columns:
        raise _unlike(name, weights.raw(name), size)
    absmax = weights.raw(f"{name}.absmax")
    if "nested_offset" in state:
        absmax = _unpacked(absmax, weights.raw(f"{name}.nested_absmax"), weights.raw(f"{name}.nested_quant_map"), state)
    if absmax.numel() * block != rows * columns:
        raise ModelLoadError(f"{name}.absmax: {absmax.numel()} scales of {block} numbers each, for {rows * columns}")
    scales = absmax.float().view(rows, columns // block).repeat_interleave(block // BLOCK, 1)
    return {"weight": packed.view(rows, columns // 2), "absmax": scales}


def _unpacked(absmax: Tensor, nested: Tensor, code: Tensor, state: dict[str, Any]) -> Tensor:
    """Scales that are quantised themselves, [n] bytes, as float32."""
    factors = nested.float().repeat_interleave(int(state["nested_blocksize"]))[: absmax.numel()]
    return code.float()[absmax.view(-1).long()].mul_(factors).add_(float(state["nested_offset"]))


def _state(stored: Tensor, name: str) -> dict[str, Any]:
    try:
        found: object = json.loads(bytes(stored.tolist()))
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"{name}.quant_state: no JSON ({error}); fetch the file again") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{name}.quant_state: no JSON object; fetch the file again")
    return cast("dict[str, Any]", found)


def _unlike(name: str, found: Tensor, size: tuple[int, int]) -> ModelLoadError:
    return ModelLoadError(
        f"{name}: {tuple(found.shape)} of {found.dtype}, but the model needs {size} numbers: config.json and weights "
        "do not belong together"
    )
