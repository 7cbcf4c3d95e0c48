"""What prefill and decode servers say to each other: signed bodies of msgpack, over HTTP.

The bytes of K/V do not come this way: workers send them to workers (``fwk.interfaces.kv_transfer``).
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import fields

import msgspec

from fwk.interfaces.dialect import GenerateInput
from fwk_kv_transfer.remote_prefill import Heads
from fwk_kv_transfer.remote_prefill.heads import misfit

SIGNATURE = "x-fwk-signature"
ABOUT = "/disaggregation/about"
PREFILL = "/disaggregation/prefill"
WITHDRAW = "/disaggregation/withdraw"
MAX_TOKENS = 2**24

FEATURE_OF_ADAPTERS = next(field.metadata["feature"] for field in fields(GenerateInput) if field.name == "adapter")
"""Whose part in a request another server has, too: it is asked for the adapter by name."""


class AskAbout(msgspec.Struct, frozen=True):
    """Asks what K/V the server computes; ``nonce`` makes the answer this question's alone."""

    nonce: bytes


class About(msgspec.Struct, frozen=True):
    """What must be the same on both servers, by the words for it, for each rank, and how its ranks share K/V heads.

    bootstrap_port: at which the first worker waits; 0: its transport has none that others could name.
    """

    nonce: bytes
    ranks: list[dict[str, str]]
    heads: Heads
    bootstrap_port: int = 0


class Order(msgspec.Struct, frozen=True):
    """Asks for a prompt's K/V, to be kept under ``key`` for ``seconds`` once computed.

    heads: of the server that asks. cache_salt, priority, adapter: as of ``GenerateInput``.
    """

    key: str
    token_ids: list[int]
    cache_salt: str
    priority: int
    seconds: float
    heads: Heads
    adapter: str = ""


class Withdraw(msgspec.Struct, frozen=True):
    """The K/V of an order are not wanted any more; there may be none yet."""

    key: str


class Withdrawn(msgspec.Struct, frozen=True):
    """They are not kept any more."""

    key: str


class Computed(msgspec.Struct, frozen=True):
    """The K/V of ``key`` are there: ``num_blocks`` full blocks. addresses: by rank, then by rank of who has asked."""

    key: str
    num_blocks: int
    addresses: list[list[bytes]]
    ranks: list[dict[str, str]]
    heads: Heads


def offer_key(key: str, cache_namespace: str) -> str:
    """What workers call the K/V of an order: what one server keeps of an adapter, another reads of the same alone."""
    return f"{key}.{hashlib.blake2b(cache_namespace.encode(), digest_size=16).hexdigest()}" if cache_namespace else key


def sign(secret: bytes, path: str, body: bytes, *, is_answer: bool) -> str:
    """The signature of a body: what was said elsewhere, or by the other side, cannot be passed off as it."""
    way = b"answer " if is_answer else b"question "
    return hmac.digest(secret, b"fwk disaggregation " + way + path.encode() + b"\0" + body, "sha256").hex()


def is_signed(secret: bytes, path: str, body: bytes, given: str, *, is_answer: bool) -> bool:
    """Whether ``given`` is its signature."""
    return hmac.compare_digest(given.encode(), sign(secret, path, body, is_answer=is_answer).encode())


def difference(
    ours: list[dict[str, str]], theirs: list[dict[str, str]], heads: tuple[Heads, Heads] | None = None
) -> str | None:
    """The first thing in which two servers differ, with both values; None when nothing does.

    heads: how ranks here share K/V heads, and ranks there.
    """
    for mine, other in zip(ours, theirs, strict=False) if len(ours) == len(theirs) else [(ours[0], x) for x in theirs]:
        for words in [*mine, *(words for words in other if words not in mine)]:
            if mine.get(words) != other.get(words):
                return f"{words} differs: {mine.get(words, 'none')} here, {other.get(words, 'none')} there"
    return None if heads is None else misfit(heads[1], heads[0])
