"""Named tensors of the seed."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import struct
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

import torch
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import WeightSource
from fwk.interfaces.quant import PACKED, PLAIN
from fwk_loaders._common.dtypes import DTYPES
from fwk_loaders._common.layouts import FLOATING, check_plain, layouts_below
from fwk_loaders.remote_instance.connection import Seed
from fwk_loaders.remote_instance.index import PATH, Index, RemoteTensor

DIGEST_BYTES = 32
MAX_BLOCK_BYTES = 16 * 2**20
MAX_REASON_BYTES = 4096


class RemoteWeights(WeightSource):
    """A tensor's bytes are fetched when it is asked for, into the memory that it is returned in.

    Every rank fetches the tensors that it reads, whole: the layers cut them. Nothing is kept here.
    """

    def __init__(self, seed: Seed, index: Index, quantization_config: Mapping[str, Any]) -> None:
        self._seed = seed
        self._index = index
        self._quantization = quantization_config
        self._turn = threading.Lock()
        weakref.finalize(self, seed.close)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As stored."""
        self._entry(name)
        check_plain(self._seed.name, name, shape, self)
        return self.raw(name)

    def raw(self, name: str) -> Tensor:
        """As stored, of whatever shape."""
        entry = self._entry(name)
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelLoadError(f"{self._seed.name}: tensor {name!r} is of the type {entry.dtype}, which is not read")
        content = torch.empty(entry.num_bytes, dtype=torch.uint8)
        if entry.num_bytes:
            with self._turn:
                self._fetch(name, content.numpy().data)
        return content.view(dtype).view(entry.shape)

    def _fetch(self, name: str, target: memoryview) -> None:
        """Fill ``target`` with a tensor's bytes: blocks, each behind its length and before its digest."""
        seed = self._seed
        answer = seed.get(f"{PATH}/tensor?{urlencode({'identity': self._index.identity, 'name': name})}")
        done, length, digest = 0, bytearray(4), bytearray(DIGEST_BYTES)
        while done < len(target):
            seed.wait()
            self._read(answer, name, memoryview(length))
            (size,) = struct.unpack("<I", length)
            if not size:
                with seed.told():
                    why = answer.read(MAX_REASON_BYTES).decode("utf-8", "replace")
                raise seed.refusal(f"gave up on tensor {name!r}: {why}")
            if size > min(MAX_BLOCK_BYTES, len(target) - done):
                raise seed.refusal(f"sent more of tensor {name!r} than there is")
            block = target[done : done + size]
            self._read(answer, name, block)
            self._read(answer, name, memoryview(digest))
            if not hmac.compare_digest(digest, block_digest(self._index.identity, name, done, block)):
                raise seed.refusal(f"sent tensor {name!r} damaged: a checksum is wrong at byte {done}")
            done += size
        with seed.told():
            if answer.read(1):
                raise seed.refusal(f"sent more of tensor {name!r} than there is")

    def _read(self, answer: http.client.HTTPResponse, name: str, target: memoryview) -> None:
        done = 0
        while done < len(target):
            with self._seed.told():
                count = answer.readinto(target[done:])
            if not count:
                raise self._seed.refusal(f"ended its answer in the middle of tensor {name!r}")
            done += count

    def stored_sizes(self) -> Mapping[str, tuple[int, int]]:
        """Floating-point tensors are ``plain``; quantised ones are in their bytes, whatever their layout."""
        found: dict[str, tuple[int, int]] = {}
        for entry in self._index.tensors.values():
            layout = PLAIN if entry.dtype in FLOATING else PACKED
            numbers, size = found.get(layout, (0, 0))
            found[layout] = (numbers + torch.Size(entry.shape).numel(), size + entry.num_bytes)
        return found

    def has(self, name: str) -> bool:
        """Whether the seed has this tensor."""
        return name in self._index.tensors

    def names(self) -> Iterable[str]:
        """All tensors."""
        return self._index.tensors.keys()

    def layouts(self, prefix: str) -> tuple[str, ...]:
        """One: the seed holds a layer in one way."""
        return layouts_below(prefix, self._quantization, self._index.tensors, self)

    def dtype(self, name: str) -> str | None:
        """The type of a tensor in safetensors' words; None when it is not there."""
        return self._index.tensors[name].dtype if name in self._index.tensors else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The size of a tensor. Raises ``ModelLoadError`` when it is missing."""
        return self._entry(name).shape

    def _entry(self, name: str) -> RemoteTensor:
        entry = self._index.tensors.get(name)
        if entry is None:
            raise ModelLoadError(
                f"{self._seed.name} has no tensor {name!r}: config.json here and the weights there do not belong "
                "together"
            )
        return entry


def block_digest(identity: str, name: str, start: int, block: memoryview) -> bytes:
    """Of bytes from ``start`` of a tensor: it fits these weights, this tensor and this place alone."""
    digest = hashlib.sha256(f"{identity} {start} {len(name)} {name}".encode())
    digest.update(block)
    return digest.digest()
