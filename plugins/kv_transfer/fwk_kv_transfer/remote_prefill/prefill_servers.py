"""A decode server's way to those that compute its prompts (``--disaggregation-prefill-servers``)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from fwk.errors import ConfigError
from fwk.interfaces.dialect import EmbedInput, GenerateInput
from fwk.interfaces.feature import RequestPart, ServerPartContext
from fwk_kv_transfer.remote_prefill import Heads, KVSource, RemotePrefillOptions
from fwk_kv_transfer.remote_prefill.messages import (
    ABOUT,
    FEATURE_OF_ADAPTERS,
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
from fwk_kv_transfer.remote_prefill.posting import CONNECT_SECONDS, OrderRefused, PeerError, post, refusal_of, words_of
from fwk_kv_transfer.remote_prefill.registry import Registry, RegistryError, open_registry, read_entry
from fwk_kv_transfer.remote_prefill.routed_decode import RoutedRequest
from fwk_kv_transfer.remote_prefill.routing import JOIN, routed
from fwk_kv_transfer.remote_prefill.server import SharedWork

log = logging.getLogger(__name__)

T = TypeVar("T")

Own = tuple[list[dict[str, str]], Heads]
"""What K/V here have in common with others', by rank, and how ranks share K/V heads."""

REST_SECONDS = 5.0
"""How long a server that has failed is not asked, while there are others."""


_REFUSALS = frozenset({(PREFILL, 400), (JOIN, 410)})
"""Of one prompt, by path and status."""


@dataclass(eq=False, slots=True)
class Peer:
    """A prefill server. mismatch: why its K/V can never be taken, until it was started anew.

    is_registered: it came from the registry, and leaves with it. bootstrap_port: where its first worker waits.
    """

    url: str
    tls: ssl.SSLContext | None
    has_agreed: bool = False
    mismatch: str | None = None
    trouble: str | None = None
    rests_until: float = field(default=0.0)
    is_registered: bool = False
    bootstrap_port: int = 0


def _peer(url: str, *, is_registered: bool = False) -> Peer:
    tls = ssl.create_default_context() if url.startswith("https") else None
    return Peer(url, tls, is_registered=is_registered)


class RemotePrefill(SharedWork):
    """Has prompts computed, by one server after another. What none computes, this server does."""

    def __init__(self, context: ServerPartContext) -> None:
        super().__init__(context)
        options: RemotePrefillOptions = context.options
        self.max_seconds = options.disaggregation_timeout + 10.0  # it ends by itself before
        self.options = options
        self.secret = options.secret()
        self._own: Own | None = None
        urls = [url.rstrip("/") for url in options.disaggregation_prefill_servers]
        self.peers = [_peer(url) for url in urls]
        self._registry: Registry | None = None
        self._registry_trouble: str | None = None
        self._router_trouble: str | None = None
        self._are_engines_ready = False
        self._kept_until = 0.0
        if options.disaggregation_registry:
            self._registry = open_registry(options.disaggregation_registry)
            context.lifecycle.background(self._follow_registry)
        self._num_orders = 0
        self._telling: set[asyncio.Task[None]] = set()

    def check(self, item: GenerateInput | EmbedInput) -> None:
        routed(item, is_prefill=False)

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        if self.context.frontend is None or not isinstance(item, GenerateInput):
            return None
        named = routed(item, is_prefill=False)
        return _Decoded(self) if named is None else RoutedRequest(self, named)

    async def engines_ready(self) -> None:
        """Shake hands with all servers that are there. Raises ``ConfigError`` when one computes other K/V."""
        if self.context.frontend is None:
            return  # nobody's requests come here
        await self._read_registry()
        self._are_engines_ready = True
        await asyncio.gather(*(self._try_peer(peer) for peer in self.peers))
        for peer in self.peers:
            if peer.mismatch is not None and not peer.is_registered:
                raise ConfigError(f"--disaggregation-prefill-servers {peer.url} cannot serve this one: {peer.mismatch}")
            if peer.trouble is not None:
                log.warning("the prefill server %s %s: prompts are computed here meanwhile", peer.url, peer.trouble)

    def trouble(self) -> str | None:
        found = [(peer.url, peer.mismatch or peer.trouble) for peer in self.peers]
        troubles = [f"prefill server {url}: {why}" for url, why in found if why]
        if self._registry_trouble is not None:
            troubles.append(self._registry_trouble)
        elif not self.peers and self._registry is not None:
            troubles.append("no prefill server is registered: prompts are computed here")
        if self._router_trouble is not None:
            troubles.append(self._router_trouble)
        return "; ".join(troubles) or None

    def tell_of_router(self, trouble: str | None) -> None:
        """Why prompts of a router are computed here; None: they need not be."""
        if trouble is not None and trouble != self._router_trouble:
            log.warning("%s", trouble)
        self._router_trouble = trouble

    async def _follow_registry(self) -> None:
        """Until the server stops: who has joined is asked for prompts, who has left is not."""
        while True:
            await asyncio.sleep(self.options.disaggregation_registry_lease / 3)
            if self._are_engines_ready:
                joined = await self._read_registry()
                await asyncio.gather(*(self._try_peer(peer) for peer in joined))

    async def _read_registry(self) -> list[Peer]:
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
            self._kept_until = time.monotonic() + self.options.disaggregation_registry_lease  # it may know nothing
        self._registry_trouble = None
        listed = {url for entry in entries if (url := read_entry(self.secret, entry)) is not None}
        keeps = time.monotonic() < self._kept_until
        for peer in [peer for peer in self.peers if peer.is_registered and peer.url not in listed and not keeps]:
            log.info("the prefill server %s has left", peer.url)
            self.peers.remove(peer)
        known = {peer.url for peer in self.peers}
        joined = [_peer(url, is_registered=True) for url in sorted(listed - known)]
        for peer in joined:
            log.info("the prefill server %s has joined", peer.url)
        self.peers += joined
        return joined

    async def source(self, token_ids: list[int], cache_salt: str, priority: int, adapter: str = "") -> KVSource | None:
        """Where the K/V of a prompt are, once another server has computed it; None: this one is to compute it."""
        if len(token_ids) < self.options.disaggregation_min_prompt_tokens:
            return None
        deadline = time.monotonic() + self.options.disaggregation_timeout
        for peer in self._in_turn()[: 1 + self.options.disaggregation_max_retries]:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                    found = await self._order(peer, token_ids, cache_salt, priority, adapter)
            except TimeoutError:
                self.failed(peer, f"has computed no prompt within {self.options.disaggregation_timeout:g} seconds")
            except OrderRefused as error:  # it has not this adapter; others' prompts it computes
                log.debug("the prefill server %s %s", peer.url, error)
            except (PeerError, OSError, EOFError) as error:
                self.failed(peer, words_of(error))
            else:
                self.succeeded(peer)
                return found
        return None

    def _in_turn(self) -> list[Peer]:
        """The servers to ask, the next one first; those that have just failed only if there is no other."""
        if not self.peers:
            return []
        self._num_orders += 1
        start = self._num_orders % len(self.peers)
        peers = [*self.peers[start:], *self.peers[:start]]
        now = time.monotonic()
        return [peer for peer in peers if peer.rests_until <= now]

    def succeeded(self, peer: Peer) -> None:
        """It has computed a prompt."""
        if peer.trouble is not None:
            log.info("the prefill server %s computes prompts again", peer.url)
        peer.trouble, peer.rests_until = None, 0.0

    def failed(self, peer: Peer, why: str) -> None:
        """It has not computed a prompt: others are asked for a while, if there are any."""
        if peer.trouble != why and peer.mismatch is None:
            log.warning("the prefill server %s %s", peer.url, why)
        peer.trouble, peer.rests_until = why, time.monotonic() + REST_SECONDS

    async def _try_peer(self, peer: Peer) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self.agree(peer)
        except TimeoutError:
            peer.trouble = f"has not answered within {CONNECT_SECONDS:g} seconds"
        except (PeerError, OSError, EOFError) as error:
            peer.trouble = words_of(error)

    async def agree(self, peer: Peer) -> None:
        """Shake hands. Raises ``PeerError`` when the other server's K/V are not this one's."""
        await self.own()
        asked = AskAbout(secrets.token_bytes(16))
        about = await self.ask(peer, ABOUT, asked, About)
        if about.nonce != asked.nonce:
            raise PeerError("has answered another question")
        peer.bootstrap_port = about.bootstrap_port
        self._compare(peer, about)

    async def own(self) -> Own:
        """What other servers' K/V are compared with."""
        if self._own is None:
            ranks, *_ = await self.context.ask("about")  # engines of one server differ in nothing
            self._own = [rank["in_common"] for rank in ranks], msgspec.convert(ranks[0]["heads"], Heads)
        return self._own

    async def read_from(self, peer: Peer, computed: Computed) -> KVSource:
        """What the engine is to read there. Raises ``PeerError`` where it cannot."""
        self._compare(peer, computed)  # it may have been started anew since
        _, heads = await self.own()
        sizes = {len(row) for row in computed.addresses}
        if len(computed.addresses) != computed.heads.num_ranks or sizes != {heads.num_ranks}:
            raise PeerError("answers with other addresses than its ranks and this server's have")
        seconds = self.options.disaggregation_timeout
        return KVSource(computed.key, seconds, computed.heads, computed.addresses, computed.num_blocks)

    def _compare(self, peer: Peer, found: About | Computed) -> None:
        """Note whether K/V are of the same kind. Raises ``PeerError``."""
        assert self._own is not None
        common, heads = self._own
        why = difference(common, found.ranks, (heads, found.heads))
        if why is not None and why != peer.mismatch:
            log.error("the prefill server %s is not used: %s", peer.url, why)
        peer.mismatch, peer.has_agreed = why, why is None
        if why is not None:
            raise PeerError(why)

    async def _order(self, peer: Peer, token_ids: list[int], cache_salt: str, priority: int, adapter: str) -> KVSource:
        if not peer.has_agreed:
            await self.agree(peer)
        seconds = self.options.disaggregation_timeout
        _, heads = await self.own()
        order = Order(uuid.uuid4().hex, token_ids, cache_salt, priority, seconds, heads, adapter)
        try:
            computed = await self.ask(peer, PREFILL, order, Computed)
        except asyncio.CancelledError:  # of a client that has left, or at the deadline: it may be computed just now
            self.withdraw(peer, order.key)
            raise
        if computed.key != order.key:
            raise PeerError("has answered another order")
        return await self.read_from(peer, computed)

    def withdraw(self, peer: Peer, key: str) -> None:
        """Tell a server that it need not keep the K/V of an order."""

        async def tell() -> None:
            try:
                async with asyncio.timeout(self.options.disaggregation_timeout):
                    await self.ask(peer, WITHDRAW, Withdraw(key), Withdrawn)
            except (PeerError, OSError, EOFError, TimeoutError) as error:
                log.debug("the prefill server %s keeps a prompt until its deadline: %s", peer.url, error)

        task = asyncio.ensure_future(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def ask(self, peer: Peer, path: str, question: Any, kind: type[T]) -> T:
        """Its signed answer. Raises ``PeerError``, ``OSError``, ``EOFError``; ``OrderRefused`` of one prompt."""
        body = msgspec.msgpack.encode(question)
        headers = {SIGNATURE: sign(self.secret, path, body, is_answer=False)}
        answer = await post(peer.url, path, headers, body, peer.tls)
        if (path, answer.status) in _REFUSALS and peer.has_agreed:
            raise OrderRefused("refuses an order")
        if answer.status != 200:
            peer.has_agreed = False
            raise PeerError(refusal_of(answer))
        given = answer.headers.get(SIGNATURE, "")
        if not is_signed(self.secret, path, answer.body, given, is_answer=True):
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
        if self.others != (FEATURE_OF_ADAPTERS,) * bool(item.adapter):
            return None  # the other server does not know what they make of its K/V
        return await self._remote.source(item.prompt_token_ids, item.cache_salt, item.priority, item.adapter)
