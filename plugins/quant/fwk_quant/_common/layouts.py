"""How published checkpoints hold integer weights, unpacked here from their descriptions and examples.

All pack numbers of ``bits`` bits into int32 words, the first in the lowest bits.

GPTQ    qweight [in / per_word, out] packed along the inputs; qzeros [groups, out / per_word] packed along the outputs;
        scales [groups, out]; g_idx [in], the group of each input. Unsigned numbers; format ``gptq`` stores each zero
        less one, ``gptq_v2`` as it is.
AWQ     qweight [in, out / 8] and qzeros [groups, out / 8] packed along the outputs, eight of them in the order 0, 2, 4,
        6, 1, 3, 5, 7; scales [groups, out]. Unsigned numbers.
compressed-tensors
        pack-quantized: weight_packed [out, in / per_word] packed along the inputs, weight_scale [out, groups],
        weight_shape [2], and weight_zero_point [out / per_word, groups] packed along the outputs; weight_g_idx [in].
        Signed numbers, moved up by 2 ** (bits - 1). int-quantized: weight [out, in] int8, weight_scale [out, groups],
        weight_zero_point like weight_scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import ALL, LinearShape, ParamSpec
from fwk_quant._common.integers import MIDDLE, IntegerMatrix, pack

if TYPE_CHECKING:
    from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def params(layout: str, bits: int, shape: LinearShape, config: Mapping[str, Any]) -> dict[str, ParamSpec]:
    """The tensors of a layer in one of these layouts. config: ``quantization_config``."""
    if layout.startswith("compressed-tensors"):
        return _compressed_params(layout, bits, shape, config)
    per_word = 32 // bits
    is_awq = layout.startswith("awq")
    in_order = is_awq or not config.get("desc_act")
    group = _group(config.get("group_size", config.get("q_group_size")), shape, in_order)
    shards = in_order and group != ALL
    found = {
        "qweight": ParamSpec(
            1, 0, torch.int32, output_block=per_word if is_awq else 1, input_block=1 if is_awq else per_word
        ),
        "qzeros": ParamSpec(1, 0, torch.int32, output_block=per_word, input_block=group, shards_input=shards),
        "scales": ParamSpec(1, 0, torch.float32, input_block=group, shards_input=shards),
    }
    return found if is_awq else {**found, "g_idx": ParamSpec(None, 0, torch.int32, is_optional=True)}


def _compressed_params(layout: str, bits: int, shape: LinearShape, config: Mapping[str, Any]) -> dict[str, ParamSpec]:
    arguments = weights_arguments(config, shape.prefix)
    strategy = arguments.get("strategy")
    if strategy not in ("tensor", "channel", "group"):
        raise ModelLoadError(f"{shape.prefix}: scales per {strategy!r} are not read, only per tensor, channel or group")
    if arguments.get("num_bits") != bits:
        raise ModelLoadError(
            f"{shape.prefix}: config.json says {arguments.get('num_bits')} bits, its tensors say {bits}"
        )
    in_order = arguments.get("actorder") != "group"
    group = _group(arguments.get("group_size") if strategy == "group" else -1, shape, in_order)
    shards, is_uniform = in_order and group != ALL, strategy == "tensor"
    is_packed = layout.endswith(f"pack-quantized:{bits}")
    per_word = 32 // bits if is_packed else 1
    zeros = ParamSpec(
        0,
        1,
        torch.int32 if is_packed else torch.int8,
        is_optional=arguments.get("symmetric") is not False,
        output_block=per_word,
        input_block=group,
        shards_input=shards,
        is_uniform=is_uniform and not is_packed,
    )
    weight = {"weight_packed": ParamSpec(0, 1, torch.int32, input_block=per_word)}
    return {
        **(weight if is_packed else {"weight": ParamSpec(0, 1, torch.int8)}),
        "weight_scale": ParamSpec(0, 1, torch.float32, input_block=group, shards_input=shards, is_uniform=is_uniform),
        "weight_zero_point": zeros,
        "weight_g_idx": ParamSpec(None, 0, torch.int32, is_optional=True),
        "weight_shape": ParamSpec(None, None, torch.int64, is_optional=True, trailing=(2,)),
        **activation_params(),
    }


def activation_params() -> dict[str, ParamSpec]:
    """How activations are to be rounded; read so that nothing is left over, by methods that do not round them, too."""
    one = ParamSpec(None, None, torch.float32, is_optional=True)
    return {"input_scale": one}


def weights_arguments(config: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """What compressed-tensors' ``config_groups`` say of the weights of a layer: its own group, else its class's."""
    groups = config.get("config_groups")
    found: Mapping[str, Any] | None = None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        targets = [str(target) for target in group.get("targets") or ()]
        names = [
            re.fullmatch(target[3:], prefix) if target.startswith("re:") else target == prefix for target in targets
        ]
        if any(names) or (found is None and "Linear" in targets):
            found = group.get("weights") or {}
        if any(names):
            break
    if found is None:
        raise ModelLoadError(
            f"{prefix} is quantised, but no entry of quantization_config's 'config_groups' is about it"
        )
    return found


def unpack(
    layout: str, bits: int, loaded: Mapping[str, Tensor], shape: LinearShape, config: Mapping[str, Any]
) -> list[IntegerMatrix]:
    """The layer's parts as one matrix; as several where each has an order of its own."""
    unpacker = _unpack_compressed if layout.startswith("compressed-tensors") else _unpack_words
    numbers, scales, zeros = unpacker(layout, bits, loaded, shape, config)
    order = _order(loaded, scales.shape[1], shape)
    if bits == 8:
        numbers, zeros = numbers - 128, zeros - 128  # as signed numbers, like int8 weights
    is_middle = bool((zeros == (MIDDLE if bits == 4 else 0)).all())
    offsets = None if is_middle else zeros.to(torch.uint8 if bits == 4 else torch.int16)
    if not bool(torch.isfinite(scales).all()):
        raise ModelLoadError(f"{shape.prefix}: a scale is infinite or not a number: fetch the file again")
    scales = _smallest(scales)
    if order is None or order.dim() == 1:
        return [IntegerMatrix(bits, pack(numbers, bits), scales, offsets, order)]
    sides = [part.split(shape.out_features) for part in (numbers, scales)]
    shifts = [None] * len(order) if offsets is None else offsets.split(shape.out_features)
    return [
        IntegerMatrix(bits, pack(one, bits), scale, offset, row)
        for one, scale, offset, row in zip(*sides, shifts, order, strict=True)
    ]


Unpacked = tuple["Tensor", "Tensor", "Tensor"]
"""Unsigned numbers [out, in], scales [out, groups] and unsigned zeros [out, groups]."""


def _unpack_words(
    layout: str, bits: int, loaded: Mapping[str, Tensor], shape: LinearShape, config: Mapping[str, Any]
) -> Unpacked:
    zeros = _unwind(loaded["qzeros"], bits, 1)
    if layout.startswith("awq"):
        numbers, zeros = _awq(_unwind(loaded["qweight"], bits, 1)), _awq(zeros)
    else:
        numbers = _unwind(loaded["qweight"], bits, 0)
        if config.get("checkpoint_format") != "gptq_v2":
            zeros = (zeros + 1) & (2**bits - 1)
    return numbers.t(), loaded["scales"].t(), zeros.t()


def _unpack_compressed(
    layout: str, bits: int, loaded: Mapping[str, Tensor], shape: LinearShape, config: Mapping[str, Any]
) -> Unpacked:
    scales, zeros, middle = loaded["weight_scale"], loaded.get("weight_zero_point"), 2 ** (bits - 1)
    if "weight" in loaded:
        numbers = loaded["weight"].int() + middle
        zeros = None if zeros is None else zeros.int() + middle
    else:
        numbers = _unwind(loaded["weight_packed"], bits, 1)
        zeros = None if zeros is None else _unwind(zeros, bits, 0)[: scales.shape[0]]
    return numbers, scales, torch.full(scales.shape, middle, dtype=torch.int32) if zeros is None else zeros


def _unwind(words: Tensor, bits: int, dim: int) -> Tensor:
    """Words along ``dim`` to the unsigned numbers in them, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    shifts = shifts.view(-1, 1) if dim == 0 else shifts
    return ((words.unsqueeze(dim + 1) >> shifts) & (2**bits - 1)).flatten(dim, dim + 1)


def _awq(numbers: Tensor) -> Tensor:
    """Columns back in order: of each eight, the one at place p is column ``AWQ_ORDER[p]``."""
    places = torch.tensor(AWQ_ORDER, device=numbers.device).argsort()
    return numbers.unflatten(1, (-1, len(AWQ_ORDER)))[:, :, places].flatten(1)


def _order(loaded: Mapping[str, Tensor], num_groups: int, shape: LinearShape) -> Tensor | None:
    """The group of each input: None where groups are runs; [in], or [num_parts, in] where parts differ."""
    order = loaded.get("g_idx", loaded.get("weight_g_idx"))
    if order is None or bool((order == -1).all()):
        if shape.in_features % num_groups:
            raise ModelLoadError(
                f"{shape.prefix}: g_idx is missing, without which its inputs cannot be shared by ranks"
            )
        return None
    order = order.long()
    first = order[:, :1]  # of a rank's inputs: not 0 on the second rank, which has the scales from there on
    runs = torch.arange(shape.in_features, device=order.device) // (shape.in_features // num_groups)
    if bool((order - first == runs).all()) and shape.in_features % num_groups == 0:
        return None
    if int(order.min()) < 0 or int(order.max()) >= num_groups:
        raise ModelLoadError(
            f"{shape.prefix}: g_idx names groups up to {int(order.max())}, but there are {num_groups}: the file is "
            "damaged, or config.json's 'desc_act' does not say that inputs are reordered"
        )
    return order[0] if bool((order == order[0]).all()) else order


def _smallest(scales: Tensor) -> Tensor:
    """In 16 bits where that changes nothing."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype).contiguous()
    return scales.contiguous()


def _group(value: Any, shape: LinearShape, in_order: bool) -> int:
    """The group size; ``ALL`` for one group."""
    if value in (-1, None):
        return ALL
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"quantization_config's group size must be a positive number or -1, not {value!r}")
    if in_order and shape.in_features % value:
        raise ModelLoadError(
            f"{shape.prefix}: groups of {value} do not divide its {shape.in_features} inputs on a rank; choose another "
            "--tensor-parallel-size, or another checkpoint"
        )
    return value
