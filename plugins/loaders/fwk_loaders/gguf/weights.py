"""The tensors of a GGUF file under their Hugging Face names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

import fwk_native as native
from fwk.errors import ModelLoadError
from fwk.interfaces.loader import WeightSource
from fwk.interfaces.quant import PLAIN
from fwk_loaders.gguf.architecture import Architecture
from fwk_loaders.gguf.native_blocks import NativeBlocks
from fwk_loaders.gguf.quants import DTYPES, DamagedBlock, dequantise
from fwk_loaders.gguf.reader import GGUFFile, TensorInfo

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without dimensions of one."""
    return tuple(size for size in shape if size != 1)


def layout_of(info: TensorInfo) -> str:
    """The name of a tensor's layout: ``gguf:TYPE``, or the plain one."""
    return PLAIN if info.type.name in _PLAIN else f"gguf:{info.type.name}"


_KV_B = "self_attn.kv_b_proj.weight"


class GGUFWeights(WeightSource):
    """Reads and de-quantises one tensor at a time; the file stays mapped, but what was read leaves memory again."""

    def __init__(self, file: GGUFFile, architecture: Architecture, num_heads: int, num_kv_heads: int) -> None:
        self._file = file
        self._architecture = architecture
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._dequantise = dequantise if native.refusal() is not None else NativeBlocks().dequantise

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of its own memory: float16 and bfloat16 as stored, everything else float32."""
        values = self._values(name, self._find(name, shape))
        return values - self._architecture.norm_offset if self._has_offset(name) else values

    def _values(self, name: str, info: TensorInfo) -> Tensor:
        if info.type.name in _PLAIN:
            values = self._rows(name, info).clone().view(_PLAIN[info.type.name]).view(info.shape)
            self._file.release(info)
        else:
            values = torch.empty(info.shape)
            self._unpack(name, info, values)
        return values

    def tensor_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Of its own memory, too; blocks become bfloat16 or float32 without another tensor in between."""
        info = self._find(name, shape)
        if info.type.name in _PLAIN or dtype not in DTYPES or self._has_offset(name):
            return super().tensor_as(name, shape, dtype, out)
        out = torch.empty(info.shape, dtype=dtype) if out is None else out
        self._unpack(name, info, out)
        return out

    def raw(self, name: str) -> Tensor:
        """The blocks as stored: [rows, blocks of a row, bytes of a block] uint8, the rows in Hugging Face's order.

        Not to be written to: they are the file's, unless rows had to be put in order.
        """
        info = self._find(name)
        rows = self._rows(name, info)
        return rows.view(rows.shape[0], -1, info.type.block_bytes)

    def release(self, names: Iterable[str]) -> None:
        """Let the pages of these tensors leave memory."""
        for name in names:
            if self.has(name):
                self._file.release(self._find(name))

    def stored_sizes(self) -> Mapping[str, tuple[int, int]]:
        """By the types of blocks."""
        found: dict[str, tuple[int, int]] = {}
        for info in self._file.tensors.values():
            layout = layout_of(info)
            numbers, size = found.get(layout, (0, 0))
            found[layout] = (numbers + math.prod(info.shape), size + info.num_bytes)
        return found

    def layouts(self, prefix: str) -> tuple[str, ...]:
        """``gguf:TYPE`` for block-quantised weights, which can be de-quantised too; all other types are plain."""
        if prefix:
            name = f"{prefix}.weight"
            expert = self._architecture.stored_expert(name)
            info = self._file.tensors.get(expert[0] if expert else self._architecture.stored_name(name) or "")
            found = [] if info is None else [info]
        else:
            found = list(self._file.tensors.values())
        return (*dict.fromkeys(layout for layout in map(layout_of, found) if layout != PLAIN), PLAIN)

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor."""
        expert = self._architecture.stored_expert(name)
        if expert is not None:
            info = self._file.tensors.get(expert[0])
            return info is not None and expert[1] < info.shape[0]
        return self._architecture.stored_name(name) in self._file.tensors

    def names(self) -> Iterable[str]:
        """Every tensor that holds weights; those the architecture does not know keep their GGUF name."""
        for stored, info in self._file.tensors.items():
            yield from self._given(stored, info)

    def _given(self, stored: str, info: TensorInfo) -> list[str]:
        if stored.startswith(("rope_freqs.", "rope_factors_")):  # part of the configuration
            return []
        given = self._architecture.given_experts(stored, info.shape[0]) or self._architecture.given_names(stored)
        return [stored] if given is None else given

    def _unpack(self, name: str, info: TensorInfo, values: Tensor) -> None:
        """The blocks of a tensor to ``values``, of its shape and one of ``DTYPES``, contiguous."""
        try:
            self._dequantise(self._rows(name, info).view(-1, info.type.block_bytes), info.type, values.view(-1))
        except DamagedBlock as error:
            raise ModelLoadError(
                f"{self._file.path}: tensor {info.name!r}: {error}; the file is damaged, fetch it again"
            ) from None
        self._file.release(info)

    def _has_offset(self, name: str) -> bool:
        return bool(self._architecture.norm_offset) and name.endswith("norm.weight")

    def _find(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
        stored, place = self._architecture.stored_expert(name) or (self._architecture.stored_name(name), None)
        info = self._file.tensors.get(stored or "")
        if info is not None and place is not None:
            info = self._expert(info, name, place)
        if info is None:
            also = f" (in GGUF: {stored!r})" if stored else ""
            raise ModelLoadError(f"{self._file.path}: tensor {name!r}{also} is missing; the file is no whole model")
        if shape is not None and squeezed(shape) == squeezed(info.shape):  # the converter drops and adds such
            info = replace(info, shape=tuple(shape))
        if shape is not None and info.shape != tuple(shape):
            raise ModelLoadError(
                f"{self._file.path}: tensor {info.name!r} ({name}) has the shape {info.shape}, but the model needs "
                f"{tuple(shape)}: the file's metadata and tensors do not belong together"
            )
        return info

    def _expert(self, info: TensorInfo, name: str, place: int) -> TensorInfo:
        """One matrix of a layer's experts, which lie one after another."""
        if len(info.shape) != (2 if name.endswith(".bias") else 3) or place >= info.shape[0]:
            raise ModelLoadError(
                f"{self._file.path}: tensor {info.name!r} has the shape {info.shape}: there is no {name!r} in it; the "
                "file's metadata and tensors do not belong together"
            )
        size = info.num_bytes // info.shape[0]
        return replace(info, shape=info.shape[1:], start=info.start + place * size, num_bytes=size)

    def _rows(self, name: str, info: TensorInfo) -> Tensor:
        """[rows, bytes of a row] uint8; a view of the file unless the rows had to be put in order."""
        num_rows = 1 if len(info.shape) == 1 else info.num_bytes // self._row_bytes(info)
        rows = torch.frombuffer(self._file.buffer, dtype=torch.uint8, count=info.num_bytes, offset=info.start)
        if self._architecture.grouped and name.rpartition(".")[0].endswith(self._architecture.grouped):
            return self._grouped(info, rows.view(info.shape[0], -1))
        if not self._architecture.interleaves_qk:
            return rows.view(num_rows, -1)
        num_heads = {"q_proj": self._num_heads, "k_proj": self._num_kv_heads}.get(name.split(".")[-2])
        if num_heads is None:
            return rows.view(num_rows, -1)
        if info.shape[0] % (2 * num_heads):
            raise ModelLoadError(
                f"{self._file.path}: tensor {info.name!r} has {info.shape[0]} rows, which do not suit {num_heads} heads"
            )
        pairs = rows.view(num_heads, info.shape[0] // num_heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(num_rows, -1)

    def _grouped(self, info: TensorInfo, rows: Tensor) -> Tensor:
        """All queries, keys and values, [features, bytes], as by K/V head: its queries, its key, its value."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        size, rest = divmod(info.shape[0], heads + 2 * kv_heads)
        if rest or heads % kv_heads:
            raise ModelLoadError(
                f"{self._file.path}: tensor {info.name!r} has {info.shape[0]} rows, which do not suit {heads} heads "
                f"and {kv_heads} of K and V"
            )
        parts = rows.split((heads * size, kv_heads * size, kv_heads * size))
        joined = torch.cat([part.view(kv_heads, -1, rows.shape[1]) for part in parts], 1)
        return joined.view(1 if len(info.shape) == 1 else info.shape[0], -1)

    @staticmethod
    def _row_bytes(info: TensorInfo) -> int:
        return info.shape[-1] // info.type.block_size * info.type.block_bytes


class LatentWeights(GGUFWeights):
    """Of latent attention (MLA): ``kv_b_proj`` is one matrix, or K's part, transposed, and V's in a tensor each."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """``kv_b_proj`` as [num_heads * (size of K + size of V), rank], whichever way it is stored."""
        parts = self._parts(name)
        if parts is None:
            return super().tensor(name, shape)
        k, v = (self._values(name, info).float() for info in parts)
        whole = torch.cat((k.transpose(1, 2), v), 1).flatten(0, 1) if k.ndim == v.ndim == 3 else k
        if tuple(whole.shape) != shape:
            raise ModelLoadError(
                f"{self._file.path}: tensors {parts[0].name!r} and {parts[1].name!r} have the shapes {parts[0].shape} "
                f"and {parts[1].shape}, but the model needs {shape} together: the file's metadata and tensors do not "
                "belong together"
            )
        return whole

    def tensor_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The same, in a type."""
        if self._parts(name) is None:
            return super().tensor_as(name, shape, dtype, out)
        found = self.tensor(name, shape)
        return found.to(dtype) if out is None else out.copy_(found)

    def layouts(self, prefix: str) -> tuple[str, ...]:
        """Plain, of a matrix in two tensors."""
        return (PLAIN,) if prefix and self._parts(f"{prefix}.weight") is not None else super().layouts(prefix)

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor, or its two parts."""
        return self._parts(name) is not None or super().has(name)

    def names(self) -> Iterable[str]:
        """The two parts under the name of the whole."""
        for name in super().names():
            if name.endswith(".attn_k_b.weight"):
                yield f"model.layers.{name.split('.')[1]}.{_KV_B}"
            elif not name.endswith(".attn_v_b.weight"):
                yield name

    def _parts(self, name: str) -> tuple[TensorInfo, TensorInfo] | None:
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        k, v = (self._file.tensors.get(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
        return None if rest != _KV_B or k is None or v is None else (k, v)
