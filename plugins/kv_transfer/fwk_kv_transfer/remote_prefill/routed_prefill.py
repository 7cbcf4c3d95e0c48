"""A prefill server's part in requests that a router has sent to it: their K/V are kept for the decode server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fwk.errors import InvalidRequest, NotServed
from fwk.interfaces.dialect import GenerateInput, OutputDelta
from fwk.interfaces.feature import RequestPart
from fwk_kv_transfer.remote_prefill import FEATURE, Heads, KVSource
from fwk_kv_transfer.remote_prefill.messages import FEATURE_OF_ADAPTERS, Computed
from fwk_kv_transfer.remote_prefill.routing import (
    HANDLES,
    Handle,
    Join,
    Routed,
    prompt_hash,
    room_key,
    sealed,
    without_fields,
)

MAX_KEPT = 4096
"""Prompts of routers known at once; those beyond are computed by decode servers."""

MAX_KEY_LEN = 128


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt that a decode server has asked for, or that a router has sent (``has_come``), or both."""

    computed: asyncio.Future[Computed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    has_come: bool = False
    num_tokens: int = 0
    readers: Heads | None = None  # of the decode server; None: it has not asked yet


class RoutedPrompts:
    """The prompts that routers have sent, by key, for as long as their K/V may be kept.

    find: ``await find(key, num_tokens, readers)`` tells where the engine keeps them for servers that share heads as the
    readers do; None where it does not. drop: ``await drop(key)`` has it keep them no longer. own_heads: how this
    server's ranks share heads.
    """

    def __init__(
        self,
        secret: bytes,
        seconds: float,
        find: Callable[[str, int, Heads | None], Awaitable[Computed | None]],
        drop: Callable[[str], Awaitable[object]],
        own_heads: Callable[[], Awaitable[Heads]],
    ) -> None:
        self._secret = secret
        self._seconds = seconds
        self._find = find
        self._drop = drop
        self._own_heads = own_heads
        self._prompts: dict[str, _Prompt] = {}

    def open(self, routed: Routed) -> KeptPrompt:
        """The part in a request."""
        return KeptPrompt(self, routed, self._seconds)

    def begin(self, key: str, *, is_joined: bool) -> bool:
        """A router has sent a prompt; False: its K/V are not kept, for another has the key, or there are too many.

        is_joined: a decode server asks for it, within the seconds of all that is kept.
        """
        prompt = self._prompts.get(key) or self._add(key)
        if prompt is None or prompt.has_come:
            return False
        prompt.has_come = True
        if is_joined:
            asyncio.get_running_loop().call_later(self._seconds, self._forget, key, prompt)
        return True

    def _add(self, key: str) -> _Prompt | None:
        if len(self._prompts) >= MAX_KEPT:
            return None
        return self._prompts.setdefault(key, _Prompt())

    def _forget(self, key: str, prompt: _Prompt) -> None:
        if self._prompts.get(key) is prompt:
            self.forget(key)
        prompt.computed.cancel()

    def forget(self, key: str) -> None:
        """No decode server asks for it."""
        self._prompts.pop(key, None)

    async def ended(self, key: str, num_tokens: int, *, is_told: bool) -> Computed | None:
        """A prompt was computed: where its K/V are, if they are kept.

        is_told: by the reply, to a decode server that is not known: one with as many ranks can read them.
        """
        prompt = self._prompts.get(key)
        if prompt is not None:
            prompt.num_tokens = num_tokens
            prompt.readers = await self._own_heads() if is_told else prompt.readers
        computed = await self._find(key, num_tokens, None if prompt is None else prompt.readers)
        prompt = self._prompts.get(key)
        if computed is not None and prompt is not None and not prompt.computed.done():
            prompt.computed.set_result(computed)
            return computed
        self.fail(key)
        if computed is not None:  # it is not waited for any more
            await self._drop(key)
        return None

    def fail(self, key: str) -> None:
        """There will be no K/V of a prompt, unless there are."""
        prompt = self._prompts.get(key)
        if prompt is not None and not prompt.computed.done():
            prompt.computed.cancel()

    def withdraw(self, key: str) -> bool:
        """A decode server does not want it any more. Whether it is known: then it is not kept when it is computed."""
        self.fail(key)
        return key in self._prompts

    async def join(self, asked: Join) -> Computed:
        """Wait for a prompt, which may come later. Raises ``NotServed`` where there are no K/V of it."""
        if not 0 < len(asked.key) <= MAX_KEY_LEN or not 0 < asked.seconds <= 3600:
            raise InvalidRequest("the key or the seconds of a prompt are out of range")
        prompt = self._prompts.get(asked.key) or self._add(asked.key)
        if prompt is None:
            raise NotServed(f"{MAX_KEPT} prompts of routers are kept already", 503)
        prompt.readers = prompt.readers or asked.heads
        try:
            await asyncio.wait([prompt.computed], timeout=asked.seconds)
        finally:
            if not prompt.has_come:
                self._forget(asked.key, prompt)
        found = prompt.computed.result() if prompt.computed.done() and not prompt.computed.cancelled() else None
        if found is not None and (not found.addresses or asked.heads != prompt.readers):
            found = await self._find(asked.key, prompt.num_tokens, asked.heads)
        if found is None:
            raise NotServed("there are no K/V of this prompt here", 410)
        return found

    def params(self, computed: Computed, prompt: str) -> dict[str, Any]:
        """``kv_transfer_params`` of a reply, with vLLM's names where these mean the same."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": computed.key,
            "tp_size": len(computed.addresses),
            HANDLES: [sealed(self._secret, Handle(prompt, computed))],
        }


class KeptPrompt(RequestPart):
    """A request of a router: the prompt is computed, with one token, and its K/V are kept."""

    def __init__(self, prompts: RoutedPrompts, routed: Routed, seconds: float) -> None:
        self._prompts = prompts
        self._routed = routed
        self._seconds = seconds
        self._key = ""
        self._prompt = ""
        self._num_tokens = 0
        self._is_computed = False

    async def check(self, item: GenerateInput) -> GenerateInput:
        return without_fields(item, max_tokens=1, min_tokens=0, prompt_logprobs=None, grammar=None)

    async def enter(self, item: GenerateInput) -> KVSource | None:
        self._prompt, self._num_tokens = prompt_hash(item), len(item.prompt_token_ids)
        room = self._routed.room
        key = room_key(room, self._prompt) if room else uuid.uuid4().hex
        if not self._prompts.begin(key, is_joined=bool(room)):
            return None
        self._key = key
        if self.others != (FEATURE_OF_ADAPTERS,) * bool(item.adapter):
            self._prompts.fail(key)  # the other server does not know what they make of its K/V
            return None
        return KVSource(key, self._seconds, None, is_limited=True)

    async def output(self, delta: OutputDelta, event: msgspec.Struct | None) -> OutputDelta:
        if delta.finish_reason is None or not self._key or self._is_computed:
            return delta
        self._is_computed = True  # of several choices the first has the prompt's K/V kept
        is_told = self._routed.params is not None
        computed = await self._prompts.ended(self._key, self._num_tokens, is_told=is_told)
        if computed is not None and is_told:
            said = msgspec.msgpack.encode(self._prompts.params(computed, self._prompt))
            delta.features = {**delta.features, FEATURE: msgspec.Raw(said)}
        return delta

    def ended(self) -> None:
        if self._key:
            self._prompts.fail(self._key)
        if self._key and not self._routed.room:
            self._prompts.forget(self._key)
