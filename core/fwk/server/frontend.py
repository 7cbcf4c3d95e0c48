"""The server as dialects see it: checks at the door, engine requests behind, text on the way back."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

import msgspec

from fwk.config import ServerOptions
from fwk.errors import EngineDead
from fwk.features.server import RequestFeatures, ServerFeatures
from fwk.interfaces.dialect import (
    AnyInput,
    Frontend,
    GenerateInput,
    Input,
    ModelCard,
    OutputDelta,
)
from fwk.interfaces.observer import RequestRecord
from fwk.interfaces.parser import StreamParser, ToolParser
from fwk.interfaces.sampling import LogitsProcessorSpec
from fwk.interfaces.served_weights import ServedWeights, WeightUpdater
from fwk.plugins import PluginSet, Registered
from fwk.server.model_engines import ModelEngines
from fwk.server.observer_dispatch import Observers
from fwk.server.parsers import Parsers
from fwk.server.stream_interval import DeltaBuffer
from fwk.server.streams import EventStream, SequenceStream
from fwk.text import ModelText, prepare_input
from fwk.types import GrammarRequest, Request, SamplingParams, TokenEvent, cache_namespace
from fwk.types.sampling import GrammarKind
from fwk_http.middleware import current_headers
from fwk_jobs.client import Work, current_work
from fwk_jobs.pool import WaitingPool

T = TypeVar("T")

DEFAULTS = ServerOptions()

MAX_UNREAD = 64
"""Steps of a stream that wait for its client, and 8 for each sequence; with more the request is paused."""

_encode = msgspec.msgpack.Encoder().encode
_decode_sampling = msgspec.msgpack.Decoder(SamplingParams).decode


def _copied(sampling: SamplingParams) -> SamplingParams:
    """For observers: its lists are theirs, and may be changed without harm."""
    return _decode_sampling(_encode(sampling))


def _namespace(item: AnyInput, parts: RequestFeatures | None) -> str:
    return cache_namespace(item.cache_salt, "" if parts is None else parts.namespace)


class ServerFrontend(Frontend):
    """One served model."""

    def __init__(
        self,
        card: ModelCard,
        text: ModelText,
        client: ModelEngines,
        plugins: PluginSet,
        observers: Observers,
        default_sampling: Mapping[str, Any],
        parsers: Parsers,
        options: ServerOptions = DEFAULTS,
    ) -> None:
        self.card = card
        self.text = text
        self.default_sampling = default_sampling
        self.grammar_kinds = frozenset(get_args(GrammarKind))  # any, until the engines have settled on a backend
        self._is_settled = False
        self._peers: Sequence[Frontend] = (self,)
        self._model_text = text
        self._parsers = parsers
        self._client = client
        self._observers = observers
        self.key_names: Mapping[str, str] = {}  # of the holders of keys, by tenant
        self.weights: ServedWeights | None = None  # of the start
        self.parts = ServerFeatures()  # of features
        self._stream_interval = options.stream_interval
        client.pool.on_stats = observers.step_finished
        client.pool.on_death = observers.engine_died
        self._threads = WaitingPool(options.tokenizer_worker_num, "fwk-text")
        self._processors = {item.name: item.declaration for item in plugins.family("logits_processors")}

    def prepare(self) -> None:
        """Build in threads what a first request would wait for, while the engines load.

        What fails here fails again where it is needed, and is told there.
        """
        self._threads.submit(self._model_text.prepare)

    def use_grammars(self, name: str) -> None:
        """Check grammars with the backend that the engines have settled on."""
        self.grammar_kinds = self.parts.use_grammars(name)
        self._is_settled = True

    @property
    def peers(self) -> Sequence[Frontend]:
        return self._peers

    def join(self, peers: Sequence[Frontend]) -> None:
        """The models of the server, of which this is one."""
        self._peers = peers
        others = tuple(peer.card.name for peer in peers if peer is not self)
        self.card = replace(self.card, peer_names=others)

    @property
    def is_loaded(self) -> bool:
        return self._client.pool.is_loaded

    def service(self, kind: type[T]) -> T | None:
        return self.parts.service(kind)

    @property
    def processor_params(self) -> Sequence[type[Any]]:
        found = [p.params for p in self._processors.values() if isinstance(p, LogitsProcessorSpec)]
        return [*(params for params in found if params is not None), *self.parts.params]

    def switch_processor(self, item: Registered, is_on: bool) -> None:
        """Take a logits processor's request fields from now on, or refuse to know them."""
        self._processors.pop(item.name, None)
        if is_on:
            self._processors[item.name] = item.declaration

    async def run_blocking(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        loop, work = asyncio.get_running_loop(), Work(self._threads)
        try:
            return await loop.run_in_executor(self._threads, partial(self._in_turn, work, function, *args, **kwargs))
        except asyncio.CancelledError:
            loop.run_in_executor(None, work.cancel)
            raise

    def _in_turn(self, work: Work, function: Any, *args: Any, **kwargs: Any) -> Any:
        current_work.set(work)
        return function(*args, **kwargs)

    def check(self, item: Input) -> Input:
        trouble = self._client.pool.trouble()
        if trouble is not None:
            raise EngineDead(trouble)
        if isinstance(item, GenerateInput):
            self.card.check_task(item.task)
        self.parts.check(item)
        card, limits = self.card, self._model_text.limits
        lengths = {"max_model_len": card.max_model_len, "vocab_size": card.vocab_size}
        item = prepare_input(item, self.text, **lengths, limits=limits)
        self.parts.check(item)
        if self._is_settled and item.sampling.grammar is not None:
            self.parts.grammars.check_grammar(item.sampling.grammar)
        return item

    def tool_parser(
        self, tools: Sequence[Mapping[str, Any]], prompt_tail: str = "", is_forced: bool = False
    ) -> ToolParser | None:
        parser: ToolParser | None = self._parsers.tool.make(tools, prompt_tail)
        grammar = parser.grammar(True) if is_forced and parser is not None else None
        if is_forced and (grammar is None or not self._can_force(grammar)):
            return self._parsers.fallback.make(tools, prompt_tail)
        return parser

    def _can_force(self, grammar: GrammarRequest) -> bool:
        """Whether the backend takes a grammar of calls: the marks of a format may need of it what it does not do."""
        if grammar.kind not in self.grammar_kinds:
            return False
        return not self._is_settled or self.parts.grammars.takes_grammar(grammar)

    def reasoning_parser(self, prompt_tail: str = "") -> StreamParser | None:
        return None if self._parsers.reasoning.is_none else self._parsers.reasoning.make((), prompt_tail)

    @property
    def served_weights(self) -> ServedWeights | None:
        updater = self.service(WeightUpdater)
        return self.weights if updater is None or updater.served is None else updater.served

    def generate(self, item: AnyInput) -> AsyncGenerator[list[OutputDelta], None]:
        return self.parts.answer(item) or self._generate(item)

    async def _generate(self, item: AnyInput) -> AsyncGenerator[list[OutputDelta], None]:
        arrived = time.monotonic()
        parts = self.parts.open(item, self.key_names.get(item.service.tenant, ""))
        try:
            item = item if parts is None else await parts.enter(item)
            async with self._client.use():
                grammar, known = item.sampling.grammar, self.parts.grammars.is_known
                if grammar is not None and not known(grammar):  # it came before the engines had settled
                    await self.run_blocking(self.parts.grammars.check_grammar, grammar)
                record, stream = self._submit(item, arrived, parts)
            num_open = item.n
            content: list[list[str]] | None = None
            if record.prompt_token_ids is not None:
                content = [[] for _ in range(item.n)]
            sequences = [SequenceStream(i, self._model_text.follow(item.sampling), arrived) for i in range(item.n)]
            buffer = DeltaBuffer(self._stream_interval) if self._stream_interval > 1 else None
            try:
                while num_open:
                    deltas = self._deltas(await stream.take(), sequences, record)
                    if parts is not None and parts.changes_output:
                        deltas = [await self._changed(parts, delta, sequences, record) for delta in deltas]
                    if content is not None:
                        for delta in deltas:
                            content[delta.index].append(delta.text)
                    num_open -= sum(delta.finish_reason is not None for delta in deltas)
                    if buffer is not None:
                        deltas = buffer.ready(deltas)
                    if deltas:
                        yield deltas
            finally:
                self._ended(record, num_open, content)
        finally:
            if parts is not None:
                parts.leave()

    def _ended(self, record: RequestRecord, num_open: int, content: list[list[str]] | None) -> None:
        if num_open:
            self._client.pool.abort(record.request_id)
            record.finish_reasons += ("abort",) * num_open
        self._client.forget(record.request_id)
        record.finished = time.monotonic()
        if content is not None:
            record.outputs = tuple("".join(pieces) for pieces in content)
        self._observers.request_finished(record)

    async def _changed(
        self, parts: RequestFeatures, delta: OutputDelta, sequences: list[SequenceStream], record: RequestRecord
    ) -> OutputDelta:
        """A delta as features' parts let it out; one of them may have ended its sequence."""
        sequence, had_ended = sequences[delta.index], delta.finish_reason is not None
        delta = await parts.output(delta)
        if delta.finish_reason is not None and not had_ended:
            sequence.is_done = True
            record.finish_reasons += (delta.finish_reason,)
            self._client.pool.abort(record.request_id, delta.index)
        return delta

    def _submit(
        self, item: AnyInput, arrived: float, parts: RequestFeatures | None
    ) -> tuple[RequestRecord, EventStream]:
        """Send a checked input to the engines, which run."""
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=item.prompt_token_ids,
            sampling=item.sampling,
            n=item.n,
            priority=item.priority,
            service=item.service,
            cache_namespace=_namespace(item, parts),
            features={} if parts is None else parts.features,
        )
        record = RequestRecord(
            request.request_id,
            item.label,
            len(item.prompt_token_ids),
            arrived,
            operation=item.operation,
            trace=item.trace,
            sampling=_copied(item.sampling) if isinstance(item, GenerateInput) else None,
            n=item.n,
            caller=self.key_names.get(item.service.tenant, ""),
            headers=self._headers(),
        )
        if self._observers.wants_content and isinstance(item, GenerateInput):
            record.prompt_token_ids = item.prompt_token_ids
        stream = EventStream(MAX_UNREAD + 8 * item.n, partial(self._client.pool.pause, request.request_id))
        self._client.submit(request, stream.put)
        self._observers.request_arrived(record)
        return record, stream

    def _headers(self) -> dict[str, str]:
        """Those of the HTTP request that observers want."""
        wanted = self._observers.wanted_headers
        if not wanted:
            return {}
        given = current_headers.get() or {}
        return {name: value.decode("latin-1") for name in wanted if (value := given.get(name.encode())) is not None}

    def _deltas(
        self, events: list[TokenEvent], sequences: list[SequenceStream], record: RequestRecord
    ) -> list[OutputDelta]:
        """Turn events into deltas, ending sequences whose text reached a stop string."""
        now = time.monotonic()
        deltas: list[OutputDelta] = []
        for event in events:
            sequence = sequences[event.index]
            if sequence.is_done:
                continue
            delta = sequence.delta(event)
            deltas.append(delta)
            count = len(delta.token_ids)
            if count:
                record.num_output_tokens += count
                record.first_token = record.first_token or now
                record.last_token = now
                record.cached_tokens = delta.cached_tokens
                self._observers.tokens_received(record, count, now - sequence.last_time)
                sequence.last_time = now
            if delta.finish_reason is not None:
                sequence.is_done = True
                record.finish_reasons += (delta.finish_reason,)
                if event.finish_reason is None:  # the engine does not know of stop strings
                    self._client.pool.abort(record.request_id, event.index)
        return deltas

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
