"""The routes of a server that computes prompts for others (``--disaggregation-mode prefill``)."""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from fwk.errors import EngineDead, InvalidRequest, NotServed, RequestFailed
from fwk.server.peer_messages import (
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
from fwk.server.replicas import Replicas
from fwk.types import KVOffer, SamplingParams, TokenEvent
from fwk.types import Request as EngineRequest
from fwk_http.replies import CLIENT_CLOSED, unless_disconnected

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SECONDS = 3600.0
MAX_KEY_LEN = 64


class PrefillRoutes:
    """Computes prompts of decode servers, which prove by a signature that they know the secret."""

    paths = (ABOUT, PREFILL, WITHDRAW)

    def __init__(self, engines: Replicas, secret: bytes, block_size: int, vocab_size: int) -> None:
        self._engines = engines
        self._secret = secret
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._orders: dict[str, tuple[str, asyncio.Future[TokenEvent]]] = {}  # by key: the request, and its end

    def routes(self, app: FastAPI) -> None:
        """Add them; no API key opens them."""

        @app.post(ABOUT, include_in_schema=False)
        async def about(request: Request) -> Response:
            asked = await self._read(request, AskAbout)
            [ranks] = await self._engines.call_workers("kv_common")
            return self._answer(ABOUT, About(asked.nonce, ranks))

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
        request = EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=order.token_ids,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            priority=order.priority,
            cache_namespace=order.namespace,
            kv_offer=KVOffer(order.key, order.seconds),
        )
        if order.key in self._orders:
            raise InvalidRequest("an order of this key is being computed")
        end: asyncio.Future[TokenEvent] = asyncio.get_running_loop().create_future()
        self._orders[order.key] = request.request_id, end
        try:
            [ranks] = await self._engines.call_workers("kv_common")
            [addresses] = await self._engines.call_workers("kv_address")
            if not end.done():  # it may have been withdrawn
                self._engines.submit(request, partial(_receive, end))
            event = await end
        finally:
            if not end.done() or end.cancelled():
                self._engines.abort(request.request_id)
            elif end.exception() is not None:  # which a client that has left does not hear
                log.debug("an order has ended: %s", end.exception())
            self._engines.forget(request.request_id)
            del self._orders[order.key]
        if event.error is not None:
            raise InvalidRequest(event.error) if event.is_refusal else RequestFailed(event.error)
        return Computed(order.key, len(order.token_ids) // self._block_size, addresses, ranks)

    async def _withdraw(self, key: str) -> None:
        """End an order, however far it is. The engine hears of its offer's end after that of its request."""
        found = self._orders.get(key)
        if found is not None:
            request_id, end = found
            self._engines.abort(request_id)
            if not end.done():
                end.set_exception(NotServed("the order was withdrawn", 410))
        await self._engines.call_workers("kv_withdraw", key)

    def _check(self, order: Order) -> None:
        trouble = self._engines.trouble()
        if trouble is not None:
            raise EngineDead(trouble)
        if not 0 < order.seconds <= MAX_SECONDS or not 0 < len(order.key) <= MAX_KEY_LEN:
            raise InvalidRequest("the key or the seconds of an order are out of range")
        if len(order.token_ids) > MAX_TOKENS or not all(0 <= token < self._vocab_size for token in order.token_ids):
            raise InvalidRequest("the order has tokens that the model has not", "token_ids")


def _receive(end: asyncio.Future[TokenEvent], news: list[TokenEvent] | EngineDead | NotServed) -> None:
    """Take in what the engine says of an order's only sequence."""
    if end.done():
        return
    if isinstance(news, EngineDead | NotServed):
        end.set_exception(news if isinstance(news, NotServed) else EngineDead(str(news)))
    elif news and news[-1].finish_reason is not None:
        end.set_result(news[-1])
