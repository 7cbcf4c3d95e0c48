"""Parts of features: asked and told in order, about the sequences that they concern alone, and at no cost to others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel
from tests.helpers.fake_plugins import FakeEntryPoint, plugin
from tests.helpers.pretend_cuda import JOURNAL, pretended
from tests.helpers.scheduling import ask, batches, finish, step

import fwk
from fwk import FeatureSpec, Options, SamplingParams, option
from fwk.errors import BlameSequence, ConfigError, InvalidRequest, NotServed, RequestFailed
from fwk.features.engine import EngineFeatures
from fwk.features.guarded import guarded
from fwk.features.server import RequestFeatures, ServerFeatures
from fwk.features.wire import Reader, packed
from fwk.interfaces.dialect import GenerateInput, OutputDelta
from fwk.interfaces.feature import (
    EnginePart,
    EnginePartContext,
    LoadedModel,
    RequestPart,
    ServerPart,
    Wire,
    WorkerPart,
    WorkerPartContext,
)
from fwk.plugins import PluginSet
from fwk_kit.testing.fake_engine import make_engine
from fwk_kit.testing.serving import TINY
from fwk_offline.parts import at_once

pytestmark = pytest.mark.usefixtures("one_thread")


class Asked(msgspec.Struct, frozen=True):
    word: str = ""


class Rows(msgspec.Struct, frozen=True):
    start: int
    sums: list[float]


class Numbers(msgspec.Struct, frozen=True):
    num_open: int = 0
    seen: int = 0


WIRE = Wire(request=Asked, sequence=Asked, step=Asked, result=Rows, event=Rows, stats=Numbers)
FEATURES = {"mine": packed(Asked("please"))}


class Part(EnginePart):
    """Notes what it is told."""

    def __init__(self, name: str = "mine") -> None:
        super().__init__(EnginePartContext(name, lambda *args: [args], WIRE))
        self.heard: list[tuple[Any, ...]] = []
        self.lets, self.busy, self.most, self.few = True, False, 10_000, 10_000
        self.proved = 0

    @property
    def is_busy(self) -> bool:
        return self.busy

    def check(self, request: Any) -> None:
        if self.asked(request).word == "no":
            raise InvalidRequest("not that word", "word")
        self.heard.append(("check", request.request_id))

    def lets_through(self, sequence: Any) -> bool:
        return self.lets

    def matchable(self, sequence: Any, count: int) -> int:
        return min(count, self.few)

    def limit(self, sequence: Any, start: int, count: int) -> int:
        return self.most

    def step(self, sequence: Any, start: int, count: int) -> Asked:
        return Asked(f"{start}+{count}")

    def prove(self, running: Any, waiting: Any) -> None:
        self.proved += 1

    def stats(self) -> Numbers:
        return Numbers(1, len(self.heard))


def _noted(name: str) -> Callable[..., None]:
    def call(self: Part, sequence: Any, *args: Any) -> None:
        self.heard.append((name, sequence.key[0], sequence.is_running))

    return call


for _name in ("arrived", "started", "ended", "preempted", "finished", "forget"):
    setattr(Part, _name, _noted(_name))


def engine_with(part: Part, **settings: Any) -> Any:
    engine = make_engine(**settings)
    engine.scheduler.parts = engine.scheduler._queue._parts = EngineFeatures([part])
    return engine


def test_a_part_hears_of_the_sequences_it_concerns_in_order() -> None:
    part = Part()
    engine = engine_with(part)
    ask(engine, "plain")
    ask(engine, "with", features=FEATURES)
    finish(engine)
    lives = ("arrived", False), ("started", True), ("finished", True), ("forget", False)
    assert part.heard == [("check", "with"), *((name, "with", running) for name, running in lives)]
    assert part.proved > 3
    [told] = {s.slot: s.features for batch in batches(engine) for s in batch.new if s.features}.values()
    assert {name: msgspec.msgpack.decode(raw, type=Asked) for name, raw in told.items()} == {"mine": Asked("please")}
    assert engine.stats().features == {"mine": {"num_open": 1, "seen": 5}}


def test_one_that_waits_lets_others_by_and_ends_where_it_is() -> None:
    part = Part()
    part.lets = False
    engine = engine_with(part)
    ask(engine, "with", features=FEATURES)
    ask(engine, "plain")
    while "plain" not in step(engine):
        pass
    assert engine.stats().num_waiting == 1
    engine.abort("with")
    assert [name for name, *_ in part.heard] == ["check", "arrived", "finished", "ended", "forget"]
    assert finish(engine) == []


def test_a_part_bounds_chunks_and_what_comes_from_the_cache() -> None:
    part = Part()
    engine = engine_with(part)
    prompt = list(range(30))
    ask(engine, "first", prompt)
    finish(engine)
    part.few, part.most = 8, 5
    ask(engine, "second", prompt, features=FEATURES)
    before = len(batches(engine))
    finish(engine)
    shares = [s.num_new_tokens for batch in batches(engine)[before:] for s in batch.sequences]
    assert shares[:5] == [5, 5, 5, 5, 2]  # after 8 of the 30 that the cache has


@pytest.mark.parametrize("wants", [False, True])
def test_steps_are_told_of_where_that_is_wanted(wants: bool) -> None:
    part = type("Stepping", (Part,), {"wants_steps": wants})()
    engine = engine_with(part)
    ask(engine, "with", prompt=6, max_tokens=5, features=FEATURES)
    finish(engine)
    told = [msgspec.msgpack.decode(s.features["mine"]) for b in batches(engine) for s in b.sequences if s.features]
    assert told == ([{"word": word} for word in ("0+6", "6+1", "7+1", "8+1", "9+1")] if wants else [])


def test_a_pre_empted_sequence_is_told_of_and_asked_for_again() -> None:
    part = Part()
    engine = engine_with(part, num_blocks=8, block_size=4)
    for name in ("one", "two"):
        ask(engine, name, prompt=10, max_tokens=12, features=FEATURES)
    finish(engine)
    of_two = [name for name, who, *_ in part.heard if who == "two"]
    assert of_two == ["check", "arrived", "started", "preempted", "arrived", "started", "finished", "forget"]


def test_what_is_refused_leaves_nothing() -> None:
    part = Part()
    engine = engine_with(part)
    request = SimpleNamespace(features={"mine": packed(Asked("no"))})
    for features, why in (({"mine": packed(Asked("no"))}, "not that word"), ({"other": packed(Asked())}, None)):
        sampling = SamplingParams(max_tokens=2)
        made = fwk.types.Request(request_id="r", prompt_token_ids=[1], sampling=sampling, features=features)  # type: ignore[attr-defined]
        events = engine.add(made)
        assert (events[0].error, events[0].is_refusal) == (why, True) if why else events == []
        finish(engine)
    assert part.asked(request).word == "no"  # type: ignore[arg-type]
    bare = make_engine()
    [event] = bare.add(fwk.types.Request(request_id="r", prompt_token_ids=[1], sampling=sampling, features=FEATURES))  # type: ignore[attr-defined]
    assert event.error == "this engine has no feature 'mine'"


def test_operations_go_to_the_engine_part_first() -> None:
    class Operating(Part):
        def operations(self) -> Mapping[str, Callable[..., Any]]:
            return {"own": lambda x: x + 1}

    parts = EngineFeatures([Operating()])
    assert parts.call("mine", "own", [1]) == 2
    assert parts.call("mine", "workers", [1]) == [("workers", 1)]
    with pytest.raises(InvalidRequest, match="this engine has no feature 'yours'"):
        parts.call("yours", "own", [1])


def test_an_engine_that_is_busy_steps_on() -> None:
    part = Part()
    engine = engine_with(part)
    assert not engine.has_work
    part.busy = True
    assert engine.has_work
    assert engine.step() == []


# In the server.


class Call(RequestPart):
    def __init__(self, name: str, seconds: float = 0.0) -> None:
        self.name, self.seconds, self.num_ended = name, seconds, 0

    async def check(self, item: Any) -> Any:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return [*item, self.name]

    async def enter(self, item: Any) -> Asked | None:
        self.namespace = self.name * 2
        return Asked(self.name) if self.name != "silent" else None

    async def output(self, delta: OutputDelta, event: msgspec.Struct | None) -> OutputDelta:
        delta.text += f"<{self.name} {event}>"
        return delta

    def ended(self) -> None:
        self.num_ended += 1


def of(*calls: Call, seconds: float = 5.0, waits: bool = True) -> RequestFeatures:
    reader = Reader(dict.fromkeys([call.name for call in calls], Asked))
    return RequestFeatures([(call.name, seconds, call) for call in calls], reader, waits=waits)


def test_parts_of_a_request_come_one_after_another() -> None:
    one, two = Call("one"), Call("silent")
    parts = of(one, two)

    async def run() -> tuple[Any, OutputDelta]:
        item = await parts.enter([])
        return item, await parts.output(OutputDelta(0, "", [], features={"one": packed(Asked("x"))}))

    item, delta = asyncio.run(run())
    assert item == ["one", "silent"]
    assert set(parts.features) == {"one"}
    assert parts.namespace == "one:oneone\0silent:silentsilent\0"
    assert delta.text == "<one Asked(word='x')><silent None>"
    parts.leave()
    assert (one.num_ended, two.num_ended) == (1, 1)


def test_one_that_takes_too_long_is_named() -> None:
    with pytest.raises(NotServed, match=r"the feature 'slow' took more than 0.05 seconds") as late:
        asyncio.run(of(Call("slow", 10.0), seconds=0.05).enter([]))
    assert late.value.status == 503


def test_a_program_without_a_loop_has_what_waits_for_nothing() -> None:
    assert at_once(of(Call("one"), waits=False).enter([])) == ["one"]
    with pytest.raises(InvalidRequest, match="a feature waits for something"):
        at_once(of(Call("slow", 0.01), waits=False).enter([]))


def test_what_is_asked_of_a_feature_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="search needs the feature 'search': none of that name is installed"):
        ServerFeatures().check(GenerateInput([1], SamplingParams(), extras={"search": {}}))


# In the workers, with the other parts.


class SumsOptions(Options):
    enable_sums: bool = option(False, "Sums of hidden states.")


class SumsFields(BaseModel):
    sums: str | None = None


class SumsCall(RequestPart):
    def __init__(self, word: str, kept: list[Rows]) -> None:
        self.word, self.kept = word, kept

    async def enter(self, item: GenerateInput) -> Asked:
        return Asked(self.word)

    async def output(self, delta: OutputDelta, event: msgspec.Struct | None) -> OutputDelta:
        if isinstance(event, Rows):
            self.kept.append(event)
        if self.word == "stop" and delta.text:
            delta.finish_reason = delta.finish_reason or "stop"
            delta.stop_reason = "sums"
        if self.word == "tell":
            delta.reply = {
                **delta.reply,
                "sums": {"lengths": [len(delta.token_ids)], "tokens": delta.num_output_tokens},
            }
        return delta


class SumsServer(ServerPart):
    kept: list[Rows] = []

    def open(self, item: Any, caller: str) -> RequestPart | None:
        word = item.sampling.extra.get("sums")
        return None if word is None else SumsCall(word, self.kept)


class SumsEngine(EnginePart):
    """Sends all that came since the last event."""

    def __init__(self, context: EnginePartContext) -> None:
        super().__init__(context)
        self._kept: dict[Any, list[float]] = {}

    def took(self, sequence: Any, result: Rows) -> None:
        kept = self._kept.setdefault(sequence.key, [])
        kept += result.sums[len(kept) - result.start :] if result.start < len(kept) else result.sums

    def event(self, sequence: Any) -> Rows:
        return Rows(0, self._kept.get(sequence.key, [])[: sequence.num_tokens - 1])

    def matchable(self, sequence: Any, count: int) -> int:
        return 0

    def forget(self, sequence: Any) -> None:
        self._kept.pop(sequence.key, None)


class SumsWorker(WorkerPart):
    """Of each token the sum of its hidden state."""

    loaded: LoadedModel
    slots: dict[int, str]

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self.slots = {}

    def model_loaded(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def begin(self, new: Any, asked: Asked) -> None:
        if asked.word == "refuse":
            raise BlameSequence(new.slot, "the workers refuse that word", True)
        self.slots[new.slot] = asked.word

    def forget(self, slot: int) -> None:
        del self.slots[slot]

    def wants_hidden(self, slots: np.ndarray) -> bool:
        return True

    def computed(self, batch: Any, forward: Any, hidden: Any, logits: Any) -> Any:
        assert hidden.shape[0] == forward.num_tokens, "of every token"
        starts, lens = forward.query_start_np, forward.seq_lens_np
        places = [
            (s.slot, int(starts[i]), int(starts[i + 1]), int(lens[i]) - int(starts[i + 1] - starts[i]))
            for i, s in enumerate(batch.sequences)
            if s.slot in self.slots
        ]
        return places, self.context.to_host(hidden.float().sum(-1))

    def results(self, made: Any) -> Mapping[int, Rows]:
        places, sums = made
        return {slot: Rows(start, sums[first:end].tolist()) for slot, first, end, start in places}


def sums(**fields: Any) -> PluginSet:
    given: dict[str, Any] = {"options": SumsOptions, "params": SumsFields, "enabled_by": ("enable_sums",)}
    given |= {where: f"{__name__}:Sums{where.capitalize()}" for where in ("server", "engine", "worker")}
    spec = FeatureSpec(name="sums", wire=WIRE, **(given | fields))
    return plugins_with(spec)


def plugins_with(spec: FeatureSpec) -> PluginSet:
    from importlib.metadata import entry_points

    from fwk.plugins import discover

    points: list[Any] = [*entry_points(group="fwk"), FakeEntryPoint("features.sums", plugin(spec, hook="features"))]
    return discover(points=[point for point in points if point.dist.name in ("fwk", "acme")])


OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "max_total_tokens": 512, "max_running_requests": 4, "chunked_prefill_size": 16,
    "dtype": "float32", "check_blocks": True, "enable_sums": True,
}  # fmt: skip
PROMPTS = [[1, 7, 3, 9] * 9, list(range(40, 75)), [5, 5, 6]]


def asks(word: str | None = None, **more: Any) -> SamplingParams:
    extra = {} if word is None else {"sums": word}
    return SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "extra": extra, **more})


def summed(llm: fwk.LLM) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens, and the last word on each sequence that asked, in the order in which they ended."""
    SumsServer.kept.clear()
    done = llm.generate(PROMPTS, [asks("yes"), asks(), asks("yes")])
    longest: dict[tuple[float, ...], list[float]] = {tuple(rows.sums[:2]): rows.sums for rows in SumsServer.kept}
    return [completion.token_ids for completion in done], sorted(longest.values(), key=len)


def test_results_come_to_the_server_on_the_host_as_from_a_device(tiny_folder: Path) -> None:
    with fwk.LLM(str(tiny_folder), plugins=sums(), **OPTIONS) as llm:
        tokens, found = summed(llm)
        assert [len(rows) for rows in found] == [len(PROMPTS[2]) + 5, len(PROMPTS[0]) + 5]
        assert summed(llm) == (tokens, found), "the second time it comes from the cache"
    with fwk.LLM(str(tiny_folder), plugins=sums(), **{**OPTIONS, "enable_sums": False}) as llm:
        assert [done.token_ids for done in llm.generate(PROMPTS, asks())] == tokens
        with pytest.raises(InvalidRequest, match="anything needs the feature 'sums': start with --enable-sums"):
            llm.call_feature("sums", "anything")
        with pytest.raises(InvalidRequest, match="sums needs an engine started with --enable-sums"):
            llm.generate(PROMPTS, asks("stop"))
    backends = dict.fromkeys(("attention_backend", "operator_backend", "sampling_backend"), "torch")
    with pretended() as others:
        others.register(plugin(FeatureSpec(
            name="sums", wire=WIRE, options=SumsOptions, enabled_by=("enable_sums",), engine=f"{__name__}:SumsEngine",
            server=f"{__name__}:SumsServer", worker=f"{__name__}:SumsWorker",
        ), hook="features"), "features.sums", "acme", "1", ())  # fmt: skip
        with fwk.LLM(str(tiny_folder), plugins=others, device="pretended", **OPTIONS | backends) as llm:
            JOURNAL.clear()
            device_tokens, device_found = summed(llm)
            assert JOURNAL.faults == []
    assert device_tokens == tokens
    for mine, other in zip(device_found, found, strict=True):
        assert mine == pytest.approx(other, abs=1e-3)


def test_a_worker_refuses_and_a_server_part_ends(tiny_folder: Path) -> None:
    with fwk.LLM(str(tiny_folder), plugins=sums(), **OPTIONS) as llm:
        with pytest.raises(InvalidRequest, match="the workers refuse that word"):
            llm.generate(PROMPTS, [asks(), asks("refuse"), asks()])
        stopped, plain = llm.generate([PROMPTS[0]] * 2, [asks("stop"), asks()])
        assert (stopped.finish_reason, plain.finish_reason) == ("stop", "length")
        assert 0 < len(stopped.token_ids) < len(plain.token_ids)
        assert (stopped.stop_reason, plain.stop_reason) == ("sums", None)


def test_what_a_server_part_adds_is_in_the_reply(tiny_folder: Path) -> None:
    with fwk.LLM(str(tiny_folder), plugins=sums(), **OPTIONS) as llm:
        told, plain = llm.generate([PROMPTS[0]] * 2, [asks("tell", logprobs=0), asks()])
    assert told.features["sums"]["tokens"] == sum(told.features["sums"]["lengths"]) == len(told.token_ids) == 6
    assert len(told.logprobs or ()) == 6
    assert plain.features == {}


def test_deltas_are_joined_with_what_parts_add_to_them() -> None:
    first = OutputDelta(0, "a", [1], reply={"one": {"rows": [1], "last": 1}})
    later = OutputDelta(0, "b", [2], reply={"one": {"rows": [2, 3], "last": 2}, "other": {"x": 0}})
    assert first.joined(later).reply == {"one": {"rows": [1, 2, 3], "last": 2}, "other": {"x": 0}}
    assert first.joined(OutputDelta(0, "b", [2])).reply == first.reply == {"one": {"rows": [1], "last": 1}}


class WholeWorker(SumsWorker):
    """Of each choice the least logit, also where all that matters to others is the largest."""

    def inputs(self, batch: Any, forward: Any) -> None:
        forward.is_greedy = False

    def computed(self, batch: Any, forward: Any, hidden: Any, logits: Any) -> Any:
        if logits is None:
            return None
        places = [(s.slot, i, i + 1, 0) for i, s in enumerate(s for s in batch.sequences if s.samples)]
        return places, self.context.to_host(logits.float().amin(-1))

    def results(self, made: Any) -> Mapping[int, Rows]:
        return {} if made is None else super().results(made)


def test_a_part_that_reads_more_than_the_largest_logit_says_so(tiny_folder: Path) -> None:
    """The head of a greedy step on a CPU leaves out logits that cannot win."""
    with fwk.LLM(
        str(tiny_folder), plugins=sums(worker=f"{__name__}:WholeWorker"), **{**OPTIONS, "dtype": "bfloat16"}
    ) as llm:
        SumsServer.kept.clear()
        llm.generate([PROMPTS[2]], asks("yes"))
        least = [value for rows in SumsServer.kept for value in rows.sums]
    assert least
    assert all(map(np.isfinite, least))


def test_a_part_in_the_engine_that_fails_ends_its_own_requests_alone(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SumsEngine, "took", lambda *_: 1 // 0)
    with fwk.LLM(str(tiny_folder), plugins=sums(), **OPTIONS) as llm:
        right = [done.token_ids for done in llm.generate(PROMPTS, asks())]
        said = r"feature 'sums' \(acme 1\.0\) raised ZeroDivisionError in took"
        with pytest.raises(RequestFailed, match=said):
            llm.generate(PROMPTS[:1], asks("yes"))
        assert [done.token_ids for done in llm.generate(PROMPTS, asks())] == right
        with pytest.raises(RequestFailed, match=said):
            llm.generate(PROMPTS[:1], asks("yes"))
        [trouble] = llm.engine.stats().troubles
        assert trouble.endswith("raised ZeroDivisionError in took; requests for it are refused")


WRONG: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "concerns": (None, ("request",), False),
    "cache_ids": ([1.5], (SimpleNamespace(prompt_token_ids=[1]),), None),
    "matchable": (-1, ("sequence", 5), 5),
    "cached": ("two", ("sequence", 5), 5),
    "limit": (None, ("sequence", 3, 5), 5),
    "new": ({}, ("sequence",), None),
    "step": (3, ("sequence", 0, 1), None),
    "event": (b"", ("sequence",), None),
    "stats": ({"num": 1}, (), None),
    "lets_through": (None, ("sequence",), True),
}
"""By method: an answer that is none, arguments, and what stands for it."""


@pytest.mark.parametrize("name", [*WRONG, "is_busy", "is_full", "planning", "forget", "finished", "preempted", "left"])
def test_each_method_of_it_fails_once(name: str) -> None:
    answer, args, default = WRONG.get(name, (None, () if name in ("planning",) else ("sequence",), None))
    is_property, count = name.startswith("is_"), 0

    def wrong(*_: Any) -> Any:
        nonlocal count
        count += 1
        if name in WRONG and count == 1 and kind == "answers":
            return answer
        raise ZeroDivisionError("no luck")

    for kind in ("raises", *(("answers",) if name in WRONG else ())):
        count, told = 0, list[str]()
        cls = type("Wrong", (EnginePart,), {name: property(wrong) if is_property else wrong})
        failed = partial(list[str].append, told)
        part = guarded(cls(EnginePartContext("wrong", call=wrong)), "feature 'wrong'", lambda _, why, f=failed: f(why))
        for _ in range(2):
            found = getattr(part, name) if is_property else getattr(part, name)(*args)
            assert found is (False if is_property else default) or found == default
        assert count == len(told) == 1, "it is asked no more"
        what = "raised ZeroDivisionError" if kind == "raises" else f"answered {type(answer).__name__}"
        assert told[0].startswith(f"feature 'wrong' {what}")
        assert told[0].endswith(f" in {name}")
        assert "no luck" not in told[0]


def test_parts_in_steps_are_for_models_that_generate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaModel"]}))
    options = {name: value for name, value in OPTIONS.items() if name != "chunked_prefill_size"}
    with pytest.raises(ConfigError, match=r"--enable-sums: feature 'sums' \(acme\) cannot be used: it has a part in s"):
        fwk.LLM(str(tmp_path), plugins=sums(), **options)
    with fwk.LLM(str(tmp_path), plugins=sums(worker=""), **options) as llm:
        assert llm.embed([[1, 2, 3]]).shape == (1, 64)


def test_a_part_by_a_former_interface_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Old.grammars is not called any more: implement WorkerPart\.masks"):
        type("Old", (WorkerPart,), {"grammars": lambda self, compile_grammar: None})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"server": "", "engine": "", "worker": ""}, "none of server, engine and worker names a part"),
        ({"server": "nowhere"}, "a part must be 'module:attribute', not 'nowhere'"),
    ],
)
def test_wrong_declarations_are_named(fields: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FeatureSpec(name="sums", **{"server": "x:y", **fields})
