"""Tells routers which blocks an engine's prefix cache holds: vLLM's and SGLang's K/V events over ZeroMQ.

A message has three parts: the topic, a sequence number (8 bytes, big-endian) and a batch in msgpack:
``[time, [event, ...]]``. Events are arrays with their name first, as ``["BlockStored", hashes, parent_hash, token_ids,
block_size, lora_id]`` and ``["BlockRemoved", hashes]``. With the format ``map`` they have their fields by name, and
their own name as ``type``, which is what vLLM's router reads; the batch stays an array.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import zmq

from fwk.errors import ConfigError

UNSIGNED = 2**32 - 1
"""Places of media, whose ids are negative words of a hash, are told as 2**31 and more, which is no token's id either:
readers of other servers' events take unsigned numbers."""


class EventsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The JSON object of ``--kv-events-config``; its other fields are refused."""

    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    topic: str = ""
    hwm: int = 100_000
    format: Literal["array", "map"] = "array"
    enable_kv_cache_events: bool = True


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Blocks that follow one another, and their tokens; the parent is the block before, None at the beginning."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Blocks that are gone."""

    block_hashes: list[int]


class StoredMap(msgspec.Struct, tag="BlockStored", frozen=True):
    """The same as a map."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class RemovedMap(msgspec.Struct, tag="BlockRemoved", frozen=True):
    """The same as a map."""

    block_hashes: list[int]
    medium: str | None = None


def read_config(text: str) -> EventsConfig:
    """Raises ``ValueError`` for what is wrong with it."""
    try:
        found = msgspec.json.decode(text, type=EventsConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f'must be a JSON object such as {{"endpoint": "tcp://*:5557"}}: {error}') from None
    if not found.endpoint.startswith(("tcp://", "ipc://")):
        raise ValueError("endpoint must begin with tcp:// or ipc://")
    if not 1 <= found.hwm <= 2**31 - 1:
        raise ValueError("hwm must be at least 1")
    return found


def block_hash(parent: int | None, key: bytes) -> int:
    """Names a block by its tokens and all before them."""
    before = b"" if parent is None else parent.to_bytes(8, "big")
    return int.from_bytes(hashlib.sha256(before + key).digest()[:8], "big")


class EventPublisher:
    """Sends each event at once and never waits: subscribers that are ``hwm`` messages behind miss some, and see it."""

    def __init__(self, config: EventsConfig) -> None:
        self._topic = config.topic.encode()
        is_map = config.format == "map"
        self._stored, self._removed = (StoredMap, RemovedMap) if is_map else (BlockStored, BlockRemoved)
        self._numbers = itertools.count()
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, config.hwm)
        try:
            self._socket.bind(config.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"--kv-events-config: cannot publish at {config.endpoint}: {error}; each engine needs one of its own"
            ) from None

    def stored(self, hashes: list[int], parent: int | None, token_ids: Sequence[int], block_size: int) -> None:
        """Blocks have come that follow one another."""
        self._send(self._stored(hashes, parent, [token & UNSIGNED for token in token_ids], block_size))

    def removed(self, hashes: list[int]) -> None:
        """Blocks have gone."""
        self._send(self._removed(hashes))

    def close(self) -> None:
        """Nothing more is sent."""
        self._socket.close()
        self._context.term()

    def _send(self, event: Any) -> None:
        batch = self._encode([time.time(), [event]])
        number = next(self._numbers).to_bytes(8, "big")
        self._socket.send_multipart([self._topic, number, batch], zmq.NOBLOCK)
