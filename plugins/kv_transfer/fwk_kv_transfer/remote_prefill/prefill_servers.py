"""A decode server's way to those that compute its prompts (``--disaggregation-prefill-servers``)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
import uuid
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec

from fwk.errors import ConfigError
from fwk.interfaces.dialect import EmbedInput, GenerateInput
from fwk.interfaces.feature import RequestPart, ServerPartContext
from fwk_kv_transfer.remote_prefill import KVSource, RemotePrefillOptions
from fwk_kv_transfer.remote_prefill.heads import Heads
from fwk_kv_transfer.remote_prefill.messages import (
    ABOUT,
    PREFILL,
    SIGNATURE,
    WITHDRAW,
    About,
    AskAbout,
    Computed,
    Order,
    Withdraw,
    Withdrawn,
    difference,
    is_signed,
    sign,
)
from fwk_kv_transfer.remote_prefill.posting import CONNECT_SECONDS, Answer, PeerError, post
from fwk_kv_transfer.remote_prefill.registry import Registry, RegistryError, open_registry, read_entry
from fwk_kv_transfer.remote_prefill.server import SharedWork

log = logging.getLogger(__name__)

T = TypeVar("T")

REST_SECONDS = 5.0
"""How long a server that has failed is not asked, while there are others."""


class OrderRefused(PeerError):
    """It computes others."""


_FEATURE_OF_ADAPTERS = next(field.metadata["feature"] for field in fields(GenerateInput) if field.name == "adapter")
"""Whose part in a request another server has, too: it is asked for the adapter by name."""


@dataclass(eq=False, slots=True)
class _Peer:
    """A prefill server. mismatch: why its K/V can never be taken, until it was started anew.

    is_registered: it came from the registry, and leaves with it.
    """

    url: str
    tls: ssl.SSLContext | None
    has_agreed: bool = False
    mismatch: str | None = None
    trouble: str | None = None
    rests_until: float = field(default=0.0)
    is_registered: bool = False


def _peer(url: str, *, is_registered: bool = False) -> _Peer:
    tls = ssl.create_default_context() if url.startswith("https") else None
    return _Peer(url, tls, is_registered=is_registered)


class RemotePrefill(SharedWork):
    """Has prompts computed, by one server after another. What none computes, this server does."""

    def __init__(self, context: ServerPartContext) -> None:
        super().__init__(context)
        options: RemotePrefillOptions = context.options
        self.max_seconds = options.disaggregation_timeout + 10.0  # it ends by itself before
        self._options = options
        self._secret = options.secret()
        self._common: list[dict[str, str]] = []
        self._heads: Heads | None = None
        urls = [url.rstrip("/") for url in options.disaggregation_prefill_servers]
        self._peers = [_peer(url) for url in urls]
        self._registry: Registry | None = None
        self._registry_trouble: str | None = None
        self._are_engines_ready = False
        self._kept_until = 0.0
        if options.disaggregation_registry:
            self._registry = open_registry(options.disaggregation_registry)
            context.lifecycle.background(self._follow_registry)
        self._num_orders = 0
        self._telling: set[asyncio.Task[None]] = set()

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        serves = self.context.frontend is not None
        return _Decoded(self) if serves and isinstance(item, GenerateInput) else None

    async def engines_ready(self) -> None:
        """Shake hands with all servers that are there. Raises ``ConfigError`` when one computes other K/V."""
        if self.context.frontend is None:
            return  # nobody's requests come here
        await self._read_registry()
        self._are_engines_ready = True
        await asyncio.gather(*(self._try_peer(peer) for peer in self._peers))
        for peer in self._peers:
            if peer.mismatch is not None and not peer.is_registered:
                raise ConfigError(f"--disaggregation-prefill-servers {peer.url} cannot serve this one: {peer.mismatch}")
            if peer.trouble is not None:
                log.warning("the prefill server %s %s: prompts are computed here meanwhile", peer.url, peer.trouble)

    def trouble(self) -> str | None:
        found = [(peer.url, peer.mismatch or peer.trouble) for peer in self._peers]
        troubles = [f"prefill server {url}: {why}" for url, why in found if why]
        if self._registry_trouble is not None:
            troubles.append(self._registry_trouble)
        elif not self._peers:
            troubles.append("no prefill server is registered: prompts are computed here")
        return "; ".join(troubles) or None

    async def _follow_registry(self) -> None:
        """Until the server stops: who has joined is asked for prompts, who has left is not."""
        while True:
            await asyncio.sleep(self._options.disaggregation_registry_lease / 3)
            if self._are_engines_ready:
                joined = await self._read_registry()
                await asyncio.gather(*(self._try_peer(peer) for peer in joined))

    async def _read_registry(self) -> list[_Peer]:
        """Take over what the registry lists; those that have joined. While it cannot be read, its servers stay."""
        if self._registry is None:
            return []
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                entries = await self._registry.entries()
        except (RegistryError, TimeoutError) as error:
            why = f"the registry {self._registry.url} {error or f'has not answered within {CONNECT_SECONDS:g} seconds'}"
            if self._registry_trouble is None:
                log.warning("%s: the prefill servers known so far are kept", why)
            self._registry_trouble = why
            return []
        if self._registry_trouble is not None:
            log.info("the registry %s is read again", self._registry.url)
            self._kept_until = time.monotonic() + self._options.disaggregation_registry_lease  # it may know nothing
        self._registry_trouble = None
        listed = {url for entry in entries if (url := read_entry(self._secret, entry)) is not None}
        keeps = time.monotonic() < self._kept_until
        for peer in [peer for peer in self._peers if peer.is_registered and peer.url not in listed and not keeps]:
            log.info("the prefill server %s has left", peer.url)
            self._peers.remove(peer)
        known = {peer.url for peer in self._peers}
        joined = [_peer(url, is_registered=True) for url in sorted(listed - known)]
        for peer in joined:
            log.info("the prefill server %s has joined", peer.url)
        self._peers += joined
        return joined

    async def source(self, token_ids: list[int], cache_salt: str, priority: int, adapter: str = "") -> KVSource | None:
        """Where the K/V of a prompt are, once another server has computed it; None: this one is to compute it."""
        if len(token_ids) < self._options.disaggregation_min_prompt_tokens:
            return None
        deadline = time.monotonic() + self._options.disaggregation_timeout
        for peer in self._in_turn()[: 1 + self._options.disaggregation_max_retries]:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                    found = await self._order(peer, token_ids, cache_salt, priority, adapter)
            except TimeoutError:
                self._failed(peer, f"has computed no prompt within {self._options.disaggregation_timeout:g} seconds")
            except OrderRefused as error:  # it has not this adapter; others' prompts it computes
                log.debug("the prefill server %s %s", peer.url, error)
            except (PeerError, OSError, EOFError) as error:
                self._failed(peer, _words(error))
            else:
                if peer.trouble is not None:
                    log.info("the prefill server %s computes prompts again", peer.url)
                peer.trouble, peer.rests_until = None, 0.0
                return found
        return None

    def _in_turn(self) -> list[_Peer]:
        """The servers to ask, the next one first; those that have just failed only if there is no other."""
        if not self._peers:
            return []
        self._num_orders += 1
        start = self._num_orders % len(self._peers)
        peers = [*self._peers[start:], *self._peers[:start]]
        now = time.monotonic()
        return [peer for peer in peers if peer.rests_until <= now]

    def _failed(self, peer: _Peer, why: str) -> None:
        if peer.trouble != why and peer.mismatch is None:
            log.warning("the prefill server %s %s", peer.url, why)
        peer.trouble, peer.rests_until = why, time.monotonic() + REST_SECONDS

    async def _try_peer(self, peer: _Peer) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._agree(peer)
        except TimeoutError:
            peer.trouble = f"has not answered within {CONNECT_SECONDS:g} seconds"
        except (PeerError, OSError, EOFError) as error:
            peer.trouble = _words(error)

    async def _agree(self, peer: _Peer) -> None:
        """Shake hands. Raises ``PeerError`` when the other server's K/V are not this one's."""
        if self._heads is None:
            ranks, *_ = await self.context.ask("about")  # engines of one server differ in nothing
            self._common = [rank["in_common"] for rank in ranks]
            self._heads = msgspec.convert(ranks[0]["heads"], Heads)
        asked = AskAbout(secrets.token_bytes(16))
        about = await self._ask(peer, ABOUT, asked, About)
        if about.nonce != asked.nonce:
            raise PeerError("has answered another question")
        self._compare(peer, about)

    def _compare(self, peer: _Peer, found: About | Computed) -> None:
        assert self._heads is not None
        why = difference(self._common, found.ranks, (self._heads, found.heads))
        if why is not None and why != peer.mismatch:
            log.error("the prefill server %s is not used: %s", peer.url, why)
        peer.mismatch, peer.has_agreed = why, why is None
        if why is not None:
            raise PeerError(why)

    async def _order(self, peer: _Peer, token_ids: list[int], cache_salt: str, priority: int, adapter: str) -> KVSource:
        if not peer.has_agreed:
            await self._agree(peer)
        seconds = self._options.disaggregation_timeout
        assert self._heads is not None
        order = Order(uuid.uuid4().hex, token_ids, cache_salt, priority, seconds, self._heads, adapter)
        try:
            computed = await self._ask(peer, PREFILL, order, Computed)
        except asyncio.CancelledError:  # of a client that has left, or at the deadline: it may be computed just now
            self._withdraw(peer, order.key)
            raise
        if computed.key != order.key:
            raise PeerError("has answered another order")
        self._compare(peer, computed)  # it may have been started anew since
        sizes = {len(row) for row in computed.addresses}
        if len(computed.addresses) != computed.heads.num_ranks or sizes != {self._heads.num_ranks}:
            raise PeerError("answers with other addresses than its ranks and this server's have")
        return KVSource(order.key, seconds, computed.heads, computed.addresses, computed.num_blocks)

    def _withdraw(self, peer: _Peer, key: str) -> None:
        """Tell a server that it need not keep the K/V of an order."""

        async def tell() -> None:
            try:
                async with asyncio.timeout(self._options.disaggregation_timeout):
                    await self._ask(peer, WITHDRAW, Withdraw(key), Withdrawn)
            except (PeerError, OSError, EOFError, TimeoutError) as error:
                log.debug("the prefill server %s keeps a prompt until its deadline: %s", peer.url, error)

        task = asyncio.ensure_future(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _ask(self, peer: _Peer, path: str, question: Any, kind: type[T]) -> T:
        body = msgspec.msgpack.encode(question)
        headers = {SIGNATURE: sign(self._secret, path, body, is_answer=False)}
        answer = await post(peer.url, path, headers, body, peer.tls)
        if answer.status == 400 and path == PREFILL and peer.has_agreed:
            raise OrderRefused("refuses an order")
        if answer.status != 200:
            peer.has_agreed = False
            raise PeerError(_refusal(answer))
        given = answer.headers.get(SIGNATURE, "")
        if not is_signed(self._secret, path, answer.body, given, is_answer=True):
            raise PeerError("has another secret in --disaggregation-token-file, or is no prefill server of fwk")
        try:
            return msgspec.msgpack.decode(answer.body, type=kind)
        except (msgspec.DecodeError, ValueError):
            raise PeerError("answers in another form: install the same fwk on both") from None


class _Decoded(RequestPart):
    """A request that this server answers, once its prompt was computed."""

    def __init__(self, remote: RemotePrefill) -> None:
        self._remote = remote

    async def enter(self, item: GenerateInput) -> KVSource | None:
        if self.others != (_FEATURE_OF_ADAPTERS,) * bool(item.adapter):
            return None  # the other server does not know what they make of its K/V
        return await self._remote.source(item.prompt_token_ids, item.cache_salt, item.priority, item.adapter)


def _refusal(answer: Answer) -> str:
    if answer.status == 401:
        return "has another secret in --disaggregation-token-file"
    if answer.status == 404:
        return "computes no prompts for others: it must be started with --disaggregation-mode prefill"
    return f"refuses ({answer.status})"


def _words(error: Exception) -> str:
    if isinstance(error, PeerError):
        return str(error)
    if isinstance(error, EOFError):
        return "ended the connection before its answer was whole"
    return f"cannot be reached ({getattr(error, 'strerror', None) or error})"
