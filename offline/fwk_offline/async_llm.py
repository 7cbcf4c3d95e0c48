"""``fwk.AsyncLLM``: the engine in a thread of this process, for programs that await."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar, cast

from fwk.errors import EngineDead, FwkError
from fwk.interfaces.completion import Completion
from fwk.plugins import PluginSet, discover
from fwk.types import SamplingParams, TokenEvent
from fwk_offline.following import Following, Key
from fwk_offline.llm import LLM, Prompt
from fwk_offline.parts import is_exclusive, method_owner, own_fields

T = TypeVar("T")

Work = Callable[[LLM], None]


@dataclass(frozen=True)
class _WhenIdle:
    """Work for when all calls before it have ended; what is asked for after it comes after it."""

    work: Work


@dataclass(frozen=True)
class _AtOnce:
    """Work that waits for nothing: the end of a call."""

    work: Work


class _Call:
    """One call's sequences. All methods but ``pieces`` are for the engine's thread.

    ``post`` runs a function on the event loop of the call.
    """

    def __init__(self, streams: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self.pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self.done: asyncio.Future[list[Completion]] = self._loop.create_future()
        self.sequences: dict[Key, Following] = {}
        self.running: set[Key] = set()
        self.is_left = False

    def tell(self, text: str) -> None:
        if self._streams and text:
            self._post(self.pieces.put_nowait, text)

    def end(self, error: BaseException | None = None) -> None:
        self._post(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if not self.done.done():
            if error is not None:
                self.done.set_exception(error)
            else:
                self.done.set_result([sequence.completion for sequence in self.sequences.values()])
        self.pieces.put_nowait(None)

    def _post(self, function: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


class AsyncLLM:
    """A model in this process whose calls are awaited; those that run at once are computed in one batch.

        async with fwk.AsyncLLM() as llm:
            [one, other] = await asyncio.gather(llm.generate("One"), llm.generate("Two"))
            async for text in llm.stream("Once upon a time"):
                print(text, end="")

    Options are those of ``fwk.LLM``. The model loads in a thread; the first call waits for it. A call that is cancelled
    is aborted in the engine.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._name = model
        self._plugins: PluginSet | None = options.get("plugins")
        self._allowed: Sequence[str] = options.get("allow_override", ())
        self._work: queue.SimpleQueue[Work | _WhenIdle | _AtOnce | None] = queue.SimpleQueue()
        self._held: deque[Work | _WhenIdle] = deque()  # one that waits for the engine to be idle, and what came after
        self._calls: dict[Key, _Call] = {}
        self._llm: LLM | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, args=(partial(LLM, model, **options),), name="fwk-llm")
        self._thread.daemon = True
        self._thread.start()

    def __repr__(self) -> str:
        if self._llm is not None and not self._is_closed:
            return f"Async{self._llm!r}"
        state = "closed" if self._is_closed else "failed to load" if self._error is not None else "is loading"
        return f"AsyncLLM({self._name!r}: {state})"

    async def __aenter__(self) -> AsyncLLM:
        await self._do(lambda llm: None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what runs, and stop the workers."""
        if not self._is_closed:
            self._is_closed = True
            self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
        **fields: Any,
    ) -> list[Completion]:
        """Complete prompts, as ``LLM.generate`` does."""
        return await self._finish(_Call(False), lambda llm: llm.inputs(prompts, sampling, n, **fields))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        **template: Any,
    ) -> Completion:
        """Answer a conversation, rendered with the model's chat template."""
        make = partial(_chat_inputs, messages, sampling, template)
        return (await self._finish(_Call(False), make))[0]

    async def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **fields: Any) -> AsyncIterator[str]:
        """Complete one prompt, giving out its text as it comes. Leaving the iterator aborts it."""
        async for text in self._pieces(lambda llm: llm.inputs([prompt], sampling, 1, **fields)):
            yield text

    async def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        **template: Any,
    ) -> AsyncIterator[str]:
        """Answer a conversation, giving out the text as it comes."""
        async for text in self._pieces(partial(_chat_inputs, messages, sampling, template)):
            yield text

    async def call_feature(self, feature: str, operation: str, *args: Any, **fields: Any) -> Any:
        """Run an operation of a feature, as ``LLM.call_feature`` does; they are run one after another.

        One that has the engine to itself (``FeatureSpec.exclusive``) waits for the calls before it, and those after it
        wait for it.
        """
        when_idle = is_exclusive(self._known_plugins, feature, operation)
        return await self._do(lambda llm: llm.call_feature(feature, operation, *args, **fields), when_idle=when_idle)

    @cached_property
    def _known_plugins(self) -> PluginSet:
        return self._plugins or discover(self._allowed)

    def __getattr__(self, name: str) -> Any:
        """The methods that features add, to be awaited."""
        owner = None if name.startswith("_") else method_owner(self._known_plugins, name)
        if owner is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(self.call_feature, owner, name)

    async def _do(self, work: Callable[[LLM], T], *, when_idle: bool = False) -> T:
        """Run a function between two steps of the engine, or when it has nothing to do."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            if not done.done():
                if error is not None:
                    done.set_exception(error)
                else:
                    done.set_result(result)

        def run(llm: LLM) -> None:
            result, error = None, self._error
            if error is None:
                try:
                    result = work(llm)
                except (FwkError, TypeError) as raised:  # the latter of arguments that are no feature's
                    error = raised
            loop.call_soon_threadsafe(tell, result, error)

        self._give(_WhenIdle(run) if when_idle else run)
        return await done

    async def _finish(self, call: _Call, make: Callable[[LLM], Any]) -> list[Completion]:
        self._give(partial(self._begin, call, make))
        try:
            return await call.done
        except asyncio.CancelledError:
            self._leave(call)
            raise

    async def _pieces(self, make: Callable[[LLM], Any]) -> AsyncIterator[str]:
        call = _Call(True)
        self._give(partial(self._begin, call, make))
        try:
            while (text := await call.pieces.get()) is not None:
                yield text
            await call.done
        finally:
            self._leave(call)

    def _give(self, work: Work | _WhenIdle) -> None:
        if self._is_closed:
            raise EngineDead("this AsyncLLM is closed")
        self._work.put(work)

    def _leave(self, call: _Call) -> None:
        call.done.cancel()
        if not self._is_closed:
            self._work.put(_AtOnce(lambda llm: self._abort(call, llm)))

    # The engine's thread

    def _run(self, load: Callable[[], LLM]) -> None:
        try:
            llm = self._llm = load()
        except BaseException as error:  # told to every call
            self._error = error
            self._refuse()
            return
        try:
            while self._take_work(llm):
                if llm.engine.has_work:
                    for event in llm.engine.step():
                        self._hand_out(event, llm)
        except BaseException as error:  # the engine is broken: so is every call
            self._fail_all(error)
            self._refuse()
        finally:
            self._fail_all(EngineDead("this AsyncLLM is closed"))
            llm.close()

    def _take_work(self, llm: LLM) -> bool:
        """Do what has been asked for; waits when the engine has nothing to do. False at the end."""
        while True:
            held = self._held[0] if self._held else None
            if held is not None and not (isinstance(held, _WhenIdle) and llm.engine.has_work):
                _do(self._held.popleft(), llm)
                continue
            try:
                work = self._work.get(block=not llm.engine.has_work)
            except queue.Empty:
                return True
            if work is None:
                return False
            if isinstance(work, _WhenIdle) or (held is not None and not isinstance(work, _AtOnce)):
                self._held.append(work)
            else:
                _do(work, llm)

    def _refuse(self) -> None:
        """There is no engine: tell every call so, until the end."""
        while (work := self._work.get()) is not None:
            _do(work, cast("LLM", None))  # each looks first whether there is an error

    def _begin(self, call: _Call, make: Callable[[LLM], Any], llm: LLM) -> None:
        if self._error is not None:
            call.end(self._error)
            return
        try:
            for item in make(llm):
                call.sequences |= llm.submit(item)
                call.running = set(call.sequences)
        except (FwkError, TypeError) as error:  # the latter of keyword arguments that are no feature's
            self._fail(call, error, llm)
            return
        self._calls |= dict.fromkeys(call.sequences, call)
        if not call.running:
            call.end()

    def _hand_out(self, event: TokenEvent, llm: LLM) -> None:
        key = (event.request_id, event.index)
        call = self._calls.get(key)
        if call is None or key not in call.running:
            return
        sequence = call.sequences[key]
        before = len(sequence.completion.text)
        try:
            has_ended = sequence.take(event, lambda: llm.engine.abort(*key))
        except FwkError as error:
            call.running.discard(key)
            self._fail(call, error, llm)
            return
        call.tell(sequence.completion.text[before:])
        if has_ended:
            call.running.discard(key)
            del self._calls[key]
            if not call.running:
                call.end()

    def _fail(self, call: _Call, error: BaseException, llm: LLM) -> None:
        self._abort(call, llm)
        call.end(error)

    def _abort(self, call: _Call, llm: LLM) -> None:
        for key in call.running:
            llm.engine.abort(*key)
            call.sequences[key].leave()
        for key in call.sequences:
            self._calls.pop(key, None)
        call.running.clear()

    def _fail_all(self, error: BaseException) -> None:
        self._error = self._error or error
        for call in set(self._calls.values()):
            call.running.clear()  # there may be no engine to abort it in
            call.end(error)
        self._calls.clear()
        while self._held:
            _do(self._held.popleft(), cast("LLM", None))


def _do(work: Work | _WhenIdle | _AtOnce, llm: LLM) -> None:
    run = work.work if isinstance(work, _WhenIdle | _AtOnce) else work
    run(llm)


def _chat_inputs(
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingParams | None,
    template: Mapping[str, Any],
    llm: LLM,
) -> Any:
    variables = dict(template)
    fields = own_fields(variables)
    return llm.inputs([llm.text.chat_ids(messages, **variables)], sampling, 1, **fields)
