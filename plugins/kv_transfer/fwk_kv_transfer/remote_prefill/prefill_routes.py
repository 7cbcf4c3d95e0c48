"""The routes of a server that computes prompts for others (``--disaggregation-mode prefill``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from fwk.errors import InvalidRequest, NotServed, RequestFailed
from fwk.interfaces.dialect import EmbedInput, GenerateInput
from fwk.interfaces.feature import Ask, RequestPart, ServerPartContext
from fwk.interfaces.lifecycle import Stage
from fwk.types import SamplingParams
from fwk_http.replies import CLIENT_CLOSED, unless_disconnected
from fwk_kv_transfer.remote_prefill import Heads, KVSource, RemotePrefillOptions
from fwk_kv_transfer.remote_prefill.messages import (
    ABOUT,
    MAX_TOKENS,
    PREFILL,
    SIGNATURE,
    WITHDRAW,
    About,
    AskAbout,
    Computed,
    Order,
    Withdraw,
    Withdrawn,
    is_signed,
    sign,
)
from fwk_kv_transfer.remote_prefill.registry import Registration
from fwk_kv_transfer.remote_prefill.routed_prefill import RoutedPrompts
from fwk_kv_transfer.remote_prefill.routing import JOIN, Join, port_of, routed
from fwk_kv_transfer.remote_prefill.server import SharedWork

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SECONDS = 3600.0
MAX_KEY_LEN = 64
MAX_WITHDRAWN = 4096
"""Keys remembered of orders that were withdrawn before they came."""

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedInput(GenerateInput):
    """A prompt whose K/V are for another server."""

    offer: KVSource


class _Ordered(RequestPart):
    """Has the engine keep what it computes."""

    async def enter(self, item: OrderedInput) -> KVSource:
        return item.offer


class PrefillRoutes(SharedWork):
    """Computes prompts of decode servers, which prove by a signature that they know the secret."""

    public_paths = (ABOUT, PREFILL, WITHDRAW, JOIN)

    def __init__(self, context: ServerPartContext) -> None:
        super().__init__(context)
        options: RemotePrefillOptions = context.options
        self._secret = options.secret()
        self._orders: dict[str, asyncio.Task[None]] = {}  # by key
        self._withdrawn: dict[str, None] = {}  # keys of orders that had not come, the newest last
        self._ranks: dict[Heads | None, list[dict[str, Any]]] = {}  # ``KVExchange.about`` of an engine, by who asks
        self._is_one: bool | None = None  # whether it is the only one; None: not asked yet
        self._routed = RoutedPrompts(
            self._secret, options.disaggregation_timeout, self._find, self._drop, self._own_heads
        )
        self._registration: Registration | None = None
        if options.disaggregation_registry is not None and context.frontend is not None:
            self._registration = Registration(options, self._secret)
            context.lifecycle.on(Stage.READY, self._registration.begin)
            context.lifecycle.background(self._registration.run)
            context.lifecycle.on(Stage.DRAIN, self._registration.end)

    async def _drop(self, key: str) -> None:
        await self.context.ask("withdraw", key)

    def trouble(self) -> str | None:
        return None if self._registration is None else self._registration.trouble()

    async def engine_begins(self, ask: Ask) -> None:
        self._is_one, self._ranks = None, {}
        self._ranks = {None: await ask("about")}

    async def _about(self, readers: Heads | None = None) -> list[dict[str, Any]]:
        """What this server's K/V are, and where workers of another read those of one of its engines, by rank."""
        found = self._ranks.get(readers)
        if found is None:
            known = self._ranks
            found, *_ = await self.context.ask("about", msgspec.to_builtins(readers))
            known[readers] = found  # an engine that has ended meanwhile is not asked any more
        return found

    async def _about_computed(self, order: Order) -> list[dict[str, Any]]:
        """The same of the engine that keeps the blocks of an order. Raises ``InvalidRequest``: they cannot be read."""
        ranks = None if self._is_one else await self._keeper(order.key, order.heads)
        ranks = ranks or await self._about(order.heads)
        why = _error(ranks)
        if why is not None:
            raise InvalidRequest(why)
        return ranks

    async def _keeper(self, key: str, readers: Heads | None) -> list[dict[str, Any]] | None:
        engines = await self.context.ask("keeps", key, msgspec.to_builtins(readers))
        self._is_one = len(engines) == 1
        return next((ranks for ranks in engines if ranks is not None), None)

    async def _find(self, key: str, num_tokens: int, readers: Heads | None) -> Computed | None:
        """Where an engine keeps the K/V of a router's prompt; None: none does, or these readers cannot read them."""
        ranks = await self._keeper(key, readers)
        why = None if ranks is None else _error(ranks)
        if why is not None:
            log.warning("the K/V of a prompt that a router has sent cannot be read: %s", why)
            await self._drop(key)
        return None if ranks is None or why is not None else _computed(key, num_tokens, ranks)

    async def _own_heads(self) -> Heads:
        return _heads(await self._about())

    def check(self, item: GenerateInput | EmbedInput) -> None:
        routed(item, is_prefill=True)

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        if isinstance(item, OrderedInput):
            return _Ordered()
        named = routed(item, is_prefill=True)
        return None if named is None else self._routed.open(named)

    def routes(self, app: FastAPI) -> None:
        """Add them; no API key opens them."""

        @app.post(ABOUT, include_in_schema=False)
        async def about(request: Request) -> Response:
            asked = await self._read(request, AskAbout)
            ranks = await self._about()
            in_common, heads = [rank["in_common"] for rank in ranks], _heads(ranks)
            first, *_ = await self._about(heads)  # it waits for a worker of a server like this one at its own port
            port = port_of(first["addresses"][0])
            return self._answer(ABOUT, About(asked.nonce, in_common, heads, port))

        @app.post(PREFILL, include_in_schema=False)
        async def prefill(request: Request) -> Response:
            order = await self._read(request, Order)
            computed = await unless_disconnected(request.receive, self._prefill(order))
            return Response(status_code=CLIENT_CLOSED) if computed is None else self._answer(PREFILL, computed)

        @app.post(WITHDRAW, include_in_schema=False)
        async def withdraw(request: Request) -> Response:
            asked = await self._read(request, Withdraw)
            await self._withdraw(asked.key)
            return self._answer(WITHDRAW, Withdrawn(asked.key))

        @app.post(JOIN, include_in_schema=False)
        async def join(request: Request) -> Response:
            asked = await self._read(request, Join)
            computed = await unless_disconnected(request.receive, self._routed.join(asked))
            return Response(status_code=CLIENT_CLOSED) if computed is None else self._answer(JOIN, computed)

    async def _read(self, request: Request, kind: type[T]) -> T:
        body, path = await request.body(), request.url.path
        if not is_signed(self._secret, path, body, request.headers.get(SIGNATURE, ""), is_answer=False):
            raise NotServed(f"{path} is for servers with the same secret in --disaggregation-token-file", 401)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.DecodeError, ValueError):
            raise InvalidRequest(f"the body of {path} is not of this version's form") from None

    def _answer(self, path: str, answer: About | Computed | Withdrawn) -> Response:
        body = msgspec.msgpack.encode(answer)
        signature = sign(self._secret, path, body, is_answer=True)
        return Response(body, media_type="application/msgpack", headers={SIGNATURE: signature})

    async def _prefill(self, order: Order) -> Computed:
        self._check(order)
        if order.key in self._orders:
            raise InvalidRequest("an order of this key is being computed")
        if order.key in self._withdrawn:
            raise NotServed("the order was withdrawn", 410)
        work = self._orders[order.key] = asyncio.ensure_future(self._compute(order))
        try:
            await asyncio.wait([work])
            if work.cancelled():
                raise NotServed("the order was withdrawn", 410)
            work.result()
            ranks = await self._about_computed(order)
        finally:
            await _end(work)
            del self._orders[order.key]
        return _computed(order.key, len(order.token_ids), ranks)

    async def _compute(self, order: Order) -> None:
        """Have the engine compute a prompt, and offer its K/V. Cancelling it aborts the request."""
        assert self.context.frontend is not None
        item = OrderedInput(
            order.token_ids,
            _ONE_TOKEN,
            priority=order.priority,
            cache_salt=order.cache_salt,
            adapter=order.adapter,
            operation="prefill",
            offer=KVSource(order.key, order.seconds, order.heads),
        )
        async with contextlib.aclosing(self.context.frontend.generate(item)) as generated:
            async for deltas in generated:
                for delta in deltas:
                    if delta.error is not None:
                        raise InvalidRequest(delta.error) if delta.is_refusal else RequestFailed(delta.error)

    async def _withdraw(self, key: str) -> None:
        """End an order, however far it is. The engine hears of its offer's end after that of its request."""
        work = self._orders.get(key)
        if work is not None:
            await _end(work)
        elif not self._routed.withdraw(key) and len(key) <= MAX_KEY_LEN:  # it may still come: by another connection
            self._withdrawn[key] = None
            if len(self._withdrawn) > MAX_WITHDRAWN:
                del self._withdrawn[next(iter(self._withdrawn))]
        await self.context.ask("withdraw", key)

    def _check(self, order: Order) -> None:
        assert self.context.frontend is not None
        vocab_size = self.context.frontend.card.vocab_size
        if not 0 < order.seconds <= MAX_SECONDS or not 0 < len(order.key) <= MAX_KEY_LEN:
            raise InvalidRequest("the key or the seconds of an order are out of range")
        if len(order.token_ids) > MAX_TOKENS or not all(0 <= token < vocab_size for token in order.token_ids):
            raise InvalidRequest("the order has tokens that the model has not", "token_ids")


def _heads(ranks: list[dict[str, Any]]) -> Heads:
    """How an engine's ranks share K/V heads, as each of them tells."""
    return msgspec.convert(ranks[0]["heads"], Heads)


def _error(ranks: list[dict[str, Any]]) -> str | None:
    """Why workers that have asked cannot read."""
    return next((rank["error"] for rank in ranks if "error" in rank), None)


def _computed(key: str, num_tokens: int, ranks: list[dict[str, Any]]) -> Computed:
    """What an engine keeps; without addresses where it is not known yet who reads."""
    addresses = [rank["addresses"] for rank in ranks if "addresses" in rank]
    in_common = [rank["in_common"] for rank in ranks]
    return Computed(key, num_tokens // ranks[0]["block_size"], addresses, in_common, _heads(ranks))


async def _end(work: asyncio.Task[None]) -> None:
    """Cancel it, and wait until its request is aborted."""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
