"""The names of the layouts in which published checkpoints hold quantised layers.

==============================================  ==============================================================
layout                                          tensors below a layer's prefix
==============================================  ==============================================================
``gptq:BITS``                                   qweight, qzeros, scales, sometimes g_idx
``awq:BITS``                                    qweight, qzeros, scales, packed in another order
``compressed-tensors:pack-quantized:BITS``      weight_packed, weight_scale, weight_shape, ...
``compressed-tensors:int-quantized``            weight (int8), weight_scale, ...
``compressed-tensors:float-quantized``          weight (float8), weight_scale, ...
``compressed-tensors:nvfp4-pack-quantized``     weight_packed (bytes), weight_scale (float8), weight_global_scale
``compressed-tensors:mxfp4-pack-quantized``     weight_packed (bytes), weight_scale (bytes)
``modelopt:nvfp4``                              weight (bytes), weight_scale (float8), weight_scale_2
``modelopt:fp8``                                weight (float8), weight_scale, sometimes input_scale
``modelopt:fp8-block``                          weight (float8), weight_scale (one per block)
``fp8``                                         weight (float8), weight_scale, sometimes input_scale
``fp8:block``                                   weight (float8), weight_scale_inv (one per block)
``mxfp4``                                       after the prefix, for all experts: _blocks, _scales (bytes)
``bitsandbytes:nf4``, ``bitsandbytes:fp4``      weight (bytes), weight.absmax, weight.quant_state.*, ...
``bitsandbytes:int8``                           weight (int8), SCB, weight_format
==============================================  ==============================================================

Anything else keeps the name config.json gives it. What is said of one layer is read off its tensors where they tell:
a checkpoint may hold layers in several ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import PLAIN

if TYPE_CHECKING:
    from torch import Tensor

FLOATING = ("F64", "F32", "F16", "BF16")
MXFP4 = "mxfp4"
WEIGHT_NAMES = (".weight", ".qweight", ".weight_packed")


class Header(Protocol):
    """What can be asked of a checkpoint's tensors without reading weights."""

    def dtype(self, name: str) -> str | None:
        """The type of a tensor in the file's words; None when it is not there."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The size of a tensor that is there."""
        ...

    def raw(self, name: str) -> Tensor:
        """A tensor's values."""
        ...


def check_plain(where: str, name: str, shape: tuple[int, ...], header: Header) -> None:
    """Raise ``ModelLoadError`` unless a tensor that is there holds floating-point numbers, and is of this shape."""
    found, stored = header.shape(name), header.dtype(name)
    if stored not in FLOATING:
        raise ModelLoadError(
            f"{where}: tensor {name!r} is quantised ({stored}), but this layer reads plain numbers only: "
            "config.json's 'quantization_config' is missing or leaves it out, or the layer cannot be quantised"
        )
    if found != tuple(shape):
        raise ModelLoadError(
            f"{where}: tensor {name!r} has the shape {found}, but the model needs {tuple(shape)}: config.json and "
            "weights do not belong together"
        )


def layouts_below(prefix: str, config: Mapping[str, Any], names: Iterable[str], header: Header) -> tuple[str, ...]:
    """``WeightSource.layouts`` of a checkpoint that holds each layer in one way, but for experts in MXFP4.

    config: ``quantization_config``.
    """
    if not config:
        return (PLAIN,)
    if prefix and header.dtype(f"{prefix}_blocks") == header.dtype(f"{prefix}_scales") == "U8":
        return MXFP4, PLAIN  # the model that reads such a stack sees numbers in it, too
    if prefix:
        return (layout_of(prefix, config, header),)
    prefixes = {name.rpartition(".")[0] for name in names if name.endswith(WEIGHT_NAMES)}
    found = {layout_of(item, config, header) for item in prefixes}
    packed = tuple(sorted(found - {PLAIN}))
    stacks = {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
    has_mxfp4 = any(MXFP4 in layouts_below(stack, config, (), header) for stack in stacks)
    return (MXFP4, *packed, *([] if packed else [PLAIN])) if has_mxfp4 else packed or (PLAIN,)


def layout_of(prefix: str, config: Mapping[str, Any], header: Header) -> str:
    """How the layer is stored. config: ``quantization_config``."""
    for kind in ("nf4", "fp4"):
        if header.dtype(f"{prefix}.weight.quant_state.bitsandbytes__{kind}") is not None:
            return f"bitsandbytes:{kind}"  # its bytes may be stored as floating-point numbers
    if header.dtype(f"{prefix}.weight") in FLOATING or all(
        header.dtype(prefix + name) is None for name in WEIGHT_NAMES
    ):
        return PLAIN  # left out by the quantiser, or nothing a linear layer has
    method = str(config.get("quant_method", "an unnamed quant_method"))
    bits = config.get("bits", config.get("w_bit"))
    if method == "gptq":
        form = str(config.get("checkpoint_format") or "gptq")
        return f"gptq:{bits}" if form in ("gptq", "gptq_v2") else f"gptq-{form}:{bits}"
    if method == "awq":
        version = str(config.get("version") or "gemm").lower()
        return f"awq:{bits}" if version == "gemm" else f"awq-{version}:{bits}"
    if method == "fp8":
        return "fp8:block" if config.get("weight_block_size") else "fp8"
    if method == "bitsandbytes" and header.dtype(f"{prefix}.SCB") is not None:
        return f"{method}:int8"
    if method == "compressed-tensors":
        return f"{method}:{_compressed_form(prefix, config, header)}"
    if method.startswith("modelopt"):
        return f"modelopt:{_modelopt_form(prefix, config, header)}"
    return method


def _compressed_form(prefix: str, config: Mapping[str, Any], header: Header) -> str:
    packed, size = f"{prefix}.weight_packed", f"{prefix}.weight_shape"
    if header.dtype(packed) == "I32" and header.dtype(size) in ("I64", "I32") and header.shape(size) == (2,):
        columns, words = int(header.raw(size)[1]), header.shape(packed)[-1]
        return f"pack-quantized:{32 // max(round(columns / max(words, 1)), 1)}"
    if header.dtype(packed) == "U8":
        of_scale = header.dtype(f"{prefix}.weight_scale")
        if of_scale == "F8_E4M3" and header.dtype(f"{prefix}.weight_global_scale") is not None:
            return "nvfp4-pack-quantized"
        if of_scale == "U8":
            return "mxfp4-pack-quantized"
    stored = {"I8": "int-quantized", "F8_E4M3": "float-quantized"}.get(header.dtype(f"{prefix}.weight") or "")
    return stored or str(config.get("format", "an unnamed format"))


def _modelopt_form(prefix: str, config: Mapping[str, Any], header: Header) -> str:
    """A checkpoint of mixed precision names no algorithm for a layer, its tensors do."""
    stored, scale = header.dtype(f"{prefix}.weight"), f"{prefix}.weight_scale"
    of_scale = header.dtype(scale)
    if header.dtype(f"{prefix}.pre_quant_scale") is None:
        if (stored, of_scale) == ("U8", "F8_E4M3") and header.dtype(f"{prefix}.weight_scale_2") is not None:
            return "nvfp4"
        if stored == "F8_E4M3" and of_scale in FLOATING:
            return "fp8-block" if sum(size > 1 for size in header.shape(scale)) > 1 else "fp8"
    return str(config.get("quant_algo", "an unnamed quant_algo"))
