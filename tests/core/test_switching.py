"""Plugins exchanged under load: nobody is lost, and a switch is whole or not at all."""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from functools import partial
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from tests.helpers.fake_plugins import FakeEntryPoint, of, plugin
from tests.helpers.scheduling import ask

from fwk import DialectSpec, Facts, Limit, Needs, Options, SchedulePolicySpec, option
from fwk.config import Config, EngineOptions
from fwk.errors import EngineDead, InvalidRequest, PluginError, PluginLoadError, RequestFailed
from fwk.interfaces.dialect import ModelCard
from fwk.interfaces.feature import EnginePartContext, ServerPartContext, WorkerPartContext
from fwk.interfaces.observer import Observer
from fwk.interfaces.sampling import LogitsProcessor, LogitsView, Sampler, SamplingContext, SamplingRows
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy
from fwk.interfaces.step import StepRows
from fwk.plugins import PluginFactory, PluginSet, Resolution, discover
from fwk.plugins.options import build_config
from fwk.server.lifecycle import LifecycleManager
from fwk.server.model_engines import ModelEngines
from fwk.server.observer_dispatch import Observers
from fwk.server.parsers import Parsers
from fwk.server.route_registry import RouteRegistry
from fwk.server.server_plugins import ServerComponents, ServerPlugins
from fwk.types import NewSequence, SamplingParams
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.sampling.pipeline import Place, SamplingPipeline
from fwk_features.plugin_switch.engine import EngineSwitch
from fwk_features.plugin_switch.server import PluginSwitcher, SwitchOrder
from fwk_features.plugin_switch.worker import ProcessorSwitch
from fwk_http.keys import Keys
from fwk_kit.testing.base import installed
from fwk_kit.testing.fake_engine import make_engine, make_policy, reference

POLICIES = [item.name for item in installed().family("schedulers")]

# The engine


@pytest.mark.parametrize("depth", [1, 2])
def test_policies_follow_one_another_under_load_and_lose_nobody(depth: int) -> None:
    """Through every pair of policies, with arrivals, pre-emption and steps in flight."""
    engine = make_engine(num_blocks=20, cache="none", depth=depth, max_running=4)
    wanted: dict[str, list[int]] = {}
    outputs: dict[str, list[int]] = {}
    number = itertools.count()
    for policy in [name for pair in itertools.permutations(POLICIES, 2) for name in pair]:
        i = next(number)
        prompt = [i % 7, i % 5, i % 11]
        ask(engine, f"r{i}", prompt, 6, priority=i * 17 % 40, tenant=str(i % 3), session=str(i % 4))
        wanted[f"r{i}"] = reference(prompt, 6)
        engine.scheduler.switch_policy(make_policy(policy), policy)
        for event in engine.step():
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
    while engine.has_work:
        for event in engine.step():
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
    assert outputs == wanted
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)
    assert stats.preemptions > 0
    engine.scheduler.check()


def test_who_waits_is_put_in_the_new_order() -> None:
    engine = make_engine(max_running=1)
    for name, length in (("first", 4), ("long", 20), ("short", 2)):
        ask(engine, name, length)
    engine.step()
    engine.scheduler.switch_policy(make_policy("sjf", {"sjf_aging": 0}), "sjf")
    ended: list[str] = []
    while engine.has_work:
        ended += [event.request_id for event in engine.step() if event.finish_reason]
    assert ended == ["first", "short", "long"]


def test_who_runs_is_pre_empted_in_the_new_order() -> None:
    """Of two that fill the KV cache, the older one leaves once priorities count."""
    engine = make_engine(num_blocks=6, cache="none", max_running=2)
    for name, priority in (("older", 0), ("urgent", 9)):
        ask(engine, name, 4, 12, priority=priority)
    engine.step()
    assert engine.scheduler.num_running == 2
    engine.scheduler.switch_policy(make_policy("priority", {}), "priority")
    ended: list[str] = []
    while engine.has_work:
        ended += [event.request_id for event in engine.step() if event.finish_reason]
    assert engine.stats().preemptions > 0
    assert ended == ["urgent", "older"]


class Failing(SchedulePolicy):
    def rank(self, sequence: Any, view: Any) -> Any:
        raise ZeroDivisionError


class Incomparable(SchedulePolicy):
    def rank(self, sequence: Any, view: Any) -> Any:
        return sequence.index if sequence.request.request_id == "r0" else "late"


@pytest.mark.parametrize("policy", [Failing, Incomparable])
@pytest.mark.parametrize("max_running", [1, 4])
def test_a_policy_that_cannot_take_over_leaves_the_old_one(policy: type[SchedulePolicy], max_running: int) -> None:
    engine = make_engine(max_running=max_running)
    for i in range(4):
        ask(engine, f"r{i}")
    engine.step()
    with pytest.raises(EngineDead):
        engine.scheduler.switch_policy(policy(ScheduleContext()), "bad")
    assert type(engine.scheduler.policy).__name__ == "FirstComeFirstServed"
    while engine.has_work:
        engine.step()
    assert engine.stats().finished == 4


def test_the_engine_switches_what_it_can() -> None:
    engine = make_engine()
    calls: list[Any] = []
    answers: list[str | None] = [None, None]

    def made(plugins: PluginSet, run: Resolution) -> EngineSwitch:
        def call(*args: Any) -> list[str | None]:
            calls.append(args)
            return answers

        factory: Any = PluginFactory(plugins, {}, run)
        use_policy = engine.scheduler.switch_policy
        return EngineSwitch(EnginePartContext("plugin_switch", call, plugins=factory, use_policy=use_policy))

    switch = made(installed(), Resolution(Facts(), {}))
    switch.switch("schedulers", "sla", {"sla_default": 3}, True)
    assert type(engine.scheduler.policy).__name__ == "EarliestDeadlineFirst"
    switch.switch("logits_processors", "penalties", {}, True)
    assert [call[0] for call in calls] == ["prepare_processor", "use_processor"]
    drafting = Resolution(Facts(drafts="tree"), {})
    no_trees = Limit("drafts", ("none",), "it counts tokens")
    plugins = of(SchedulePolicySpec(name="counting", load="a:b", limits=(no_trees,)))
    with pytest.raises(PluginError, match=r"'counting' .acme. cannot be used: it serves drafts none only, not tree"):
        made(plugins, drafting).switch("schedulers", "counting", {}, True)
    for family, name, options in (
        ("schedulers", "nobody", {}),
        ("schedulers", "sla", {"sla_default": -1}),
        ("attention", "torch", {}),
    ):
        with pytest.raises(Exception, match=r"nobody|sla-default|cannot be switched"):
            switch.switch(family, name, options, True)
    answers[1] = "rank 1 cannot"
    with pytest.raises(PluginError, match="rank 1 cannot"):
        switch.switch("logits_processors", "penalties", {}, True)
    assert calls[-1][0] == "prepare_processor", "no rank uses what another one has not"


def test_only_the_last_switch_is_taken_back() -> None:
    engine = make_engine()
    factory: Any = PluginFactory(installed(), {}, Resolution(Facts(), {}))
    use_policy = engine.scheduler.switch_policy
    context = EnginePartContext("plugin_switch", lambda *args: [], plugins=factory, use_policy=use_policy)
    run = EngineSwitch(context).operations()
    run["switch"](7, "schedulers", "sla", {}, True)
    for number, policy in ((6, "EarliestDeadlineFirst"), (7, "FirstComeFirstServed")):
        run["take_back"](number, "schedulers", "fcfs", {}, True)
        assert type(engine.scheduler.policy).__name__ == policy


# The worker


def test_a_model_that_chooses_no_tokens_has_no_processors() -> None:
    device, nothing = torch.device("cpu"), SimpleNamespace()
    part = ProcessorSwitch(WorkerPartContext("plugin_switch", device, nothing, nothing))  # type: ignore[arg-type]
    assert "does not generate" in (part.prepare("penalties", {}, True) or "")


class Favour(LogitsProcessor):
    """Makes one token the likeliest, for those who ask."""

    def __init__(self, token: int) -> None:
        super().__init__(SamplingContext(8, 4, torch.device("cpu"), ()))
        self.token = token
        self.is_closed = False
        self.slots: set[int] = set()

    def add(self, slot: int, params: SamplingParams) -> bool:
        self.slots.add(slot)
        return True

    def remove(self, slot: int) -> None:
        self.slots.remove(slot)

    def apply(self, logits: torch.Tensor, view: LogitsView) -> torch.Tensor:
        for row, slot in enumerate(view.slots.tolist()):
            if slot in self.slots:
                logits[row, self.token] += 10
        return logits

    def close(self) -> None:
        self.is_closed = True


class Greedy(Sampler):
    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return logits.argmax(dim=-1)


def test_sequences_keep_the_processors_they_started_with() -> None:
    import numpy as np

    table = SequenceTable(4, 16, 4)
    old, new = Favour(1), Favour(2)
    place = Place(100, "favour")
    context = SamplingContext(8, 4, torch.device("cpu"), ())
    pipeline = SamplingPipeline({place: old}, Greedy(context), table)

    def start(slot: int) -> None:
        pipeline.add(NewSequence(slot, [1], 1, 0, [], SamplingParams(max_tokens=4), 0))

    def picked(*slots: int) -> list[int]:
        rows = StepRows(np.arange(len(slots)), np.asarray(slots), np.ones(len(slots), np.int64))
        return pipeline.choose(torch.zeros(len(slots), 8), rows).tolist()

    start(0)
    pipeline.switch(place, new)
    start(1)
    assert picked(0, 1) == [1, 2]
    pipeline.switch(place, None)
    start(2)
    assert picked(0, 1, 2) == [1, 2, 0]
    assert not old.is_closed
    pipeline.remove(0)
    assert old.is_closed
    assert picked(1, 2) == [2, 0]
    pipeline.remove(1)
    pipeline.remove(2)
    assert new.is_closed
    assert pipeline._active == []


# The server


class Engines:
    """Stands for the engine processes' clients."""

    def __init__(self, refusing: bool = False, is_dead: bool = False) -> None:
        self.refusing = refusing
        self.is_dead = is_dead
        self.switched: list[Any] = []
        self.last = 0

    async def call_feature(self, feature: str, operation: str, arguments: Any) -> None:
        number, family, name, _, is_on = arguments
        if operation == "take_back" and number != self.last:
            return
        if self.refusing:
            raise InvalidRequest("not here", "options")
        self.last = number
        self.switched.append((family, name, is_on))


def replicas(*clients: Engines) -> ModelEngines:
    pool: Any = SimpleNamespace(engines=[client for client in clients if not client.is_dead], use=nullcontext)
    return ModelEngines(Config(), lambda begins: pool)


def switching(engines: ModelEngines, **fields: Any) -> PluginSwitcher:
    ask = partial(engines.call_feature, "plugin_switch")
    return PluginSwitcher(ServerPartContext("plugin_switch", "m", SimpleNamespace(), ask, **fields))  # type: ignore[arg-type]


async def test_all_engines_switch_or_none() -> None:
    new, old = ("schedulers", "sjf", {}, True), ("schedulers", "fcfs", {}, True)
    good, bad, dead = Engines(), Engines(refusing=True), Engines(is_dead=True)
    group = switching(replicas(good, dead))
    await group.switch_engines(new, old)
    assert good.switched == [("schedulers", "sjf", True)]
    assert dead.switched == []
    assert list(group._switched.values()) == [new], "an engine that is started again gets it"
    group = switching(replicas(good, bad))
    with pytest.raises(InvalidRequest, match="not here"):
        await group.switch_engines(new, old)
    assert good.switched[1:] == [("schedulers", "sjf", True), ("schedulers", "fcfs", True)]
    assert not group._switched


class Frontend:
    """As much of the frontend as a switch touches."""

    def __init__(self) -> None:
        self.card = ModelCard("m", "/m", 0, 64, 320)
        self.text: Any = SimpleNamespace(decode=str, has_tokenizer=True)
        self.processors: list[tuple[str, bool]] = []

    def switch_processor(self, item: Any, is_on: bool) -> None:
        self.processors.append((item.name, is_on))


class Board:
    """A plugin_switcher over the installed plugins, with engines that agree to everything."""

    def __init__(self, plugins: PluginSet | None = None, **options: Any) -> None:
        plugins = plugins or installed()
        config = build_config(plugins, options)
        self.app = FastAPI()
        self.engine = Engines()
        self.frontend: Any = Frontend()
        self.lifecycles = LifecycleManager()
        parsers = Parsers(config, plugins, "")
        self.routes = RouteRegistry(self.app, Keys(None, "admin"))
        engines = replicas(self.engine)
        self.parts = ServerComponents(self.frontend, Observers(), parsers, self.routes, engines, self.lifecycles)
        self.running = ServerPlugins(config, plugins, self.parts, "")
        factory = PluginFactory(plugins, config.plugin_options)
        self.plugin_switcher = switching(engines, running=self.running, plugins=factory)

    async def start(self) -> Board:
        await self.running.start()
        await self.running.ready({"schedulers": "fcfs"})
        return self

    async def switch(self, family: str, name: str, enabled: bool = True, **options: Any) -> dict[str, Any]:
        order = SwitchOrder(family=family, name=name, options=options, enabled=enabled)
        return await self.plugin_switcher.switch(order)

    @property
    def paths(self) -> set[str]:
        return {getattr(route, "path", "") for route in self.app.router.routes}

    async def stop(self) -> None:
        self.parts.observers.close()
        await self.lifecycles.end()


@pytest.fixture
async def board() -> Any:
    board = await Board().start()
    yield board
    await board.stop()


async def test_a_policy_and_its_options(board: Board) -> None:
    before = board.running.fingerprint({})
    answer = await board.switch("schedulers", "sla", **{"sla-default": 3.0})
    assert answer["chosen"]["schedulers"] == "sla"
    assert board.engine.switched == [("schedulers", "sla", True)]
    config = board.running.config
    assert config.engine.schedule_policy == "sla"
    assert config.plugin_options == {"schedulers.sla": {"sla_default": 3.0}}
    assert board.running.fingerprint({}) != before
    await board.switch("schedulers", "fcfs")
    assert board.running.config.plugin_options == {}
    assert board.running.fingerprint({}) == before


async def test_parsers(board: Board) -> None:
    await board.switch("tool_parsers", "hermes", enabled=False)
    assert board.parts.parsers.tool.make((), "") is None
    await board.switch("tool_parsers", "hermes")
    assert board.parts.parsers.tool.make((), "") is not None
    assert board.running.config.server.tool_call_parser == "hermes"
    answer = await board.switch("tool_parsers", "hermes", enabled=False)
    assert answer["chosen"]["tool_parsers"] == "none"
    assert board.parts.parsers.tool.make((), "") is None


async def test_dialects_and_observers(board: Board) -> None:
    assert {"/generate", "/v1/chat/completions", "/metrics"} <= board.paths
    num_routes = len(board.app.router.routes)
    await board.switch("dialects", "tgi", enabled=False)
    await board.switch("observers", "prometheus", enabled=False)
    await board.switch("observers", "prometheus", enabled=False)
    assert {"/generate", "/metrics"}.isdisjoint(board.paths)
    assert "dialects.tgi" not in board.running.active()
    await board.switch("observers", "prometheus", bucket_e2e_request_latency=[1.0])
    await board.switch("dialects", "tgi")
    await board.switch("dialects", "tgi")
    assert len(board.app.router.routes) == num_routes
    assert len(board.parts.observers._listeners) == 2, "the log's, and the new one's"


async def test_processors(board: Board) -> None:
    await board.switch("logits_processors", "penalties")
    assert board.engine.switched == [("logits_processors", "penalties", True)]
    assert board.frontend.processors[-1] == ("penalties", True)
    with pytest.raises(InvalidRequest, match="without effect"):
        await board.switch("logits_processors", "penalties", enabled=False)


@pytest.mark.gate(6)
@pytest.mark.parametrize(
    ("family", "name", "enabled", "options", "words"),
    [
        ("attention", "cpu", True, {}, "restart with --attention-backend cpu"),
        ("quant", "int8", True, {}, "restart with --quantization int8"),
        ("model_sources", "hub", True, {}, "restart"),
        ("nothing", "x", True, {}, "unknown family 'nothing'; there are attention"),
        ("schedulers", "nobody", True, {}, "unknown schedule policy 'nobody'; installed"),
        ("schedulers", "sjf", True, {"sjf_aging": -1}, "sjf-aging"),
        ("schedulers", "sjf", True, {"sla_default": 1}, "sla-default"),
        ("schedulers", "fcfs", True, {"x": 1}, "takes no options"),
        ("schedulers", "fcfs", False, {}, "always a schedule policy"),
        ("observers", "otel", True, {}, "is off unless"),
        ("observers", "prometheus", False, {"bucket_e2e_request_latency": [1.0]}, "switched on"),
    ],
)
async def test_what_is_refused_changes_nothing(
    board: Board, family: str, name: str, enabled: bool, options: dict[str, Any], words: str
) -> None:
    before, paths = board.running.config, board.paths
    with pytest.raises(InvalidRequest, match=words):
        await board.switch(family, name, enabled, **options)
    assert board.running.config is before
    assert board.paths == paths
    assert board.engine.switched == []


async def test_engines_that_refuse_change_nothing(board: Board) -> None:
    board.engine.refusing = True
    with pytest.raises(InvalidRequest, match="not here"):
        await board.switch("schedulers", "sjf")
    assert board.running.config == Config(engine=EngineOptions(), seed=board.running.config.seed)
    assert board.running.chosen()["schedulers"] == "fcfs"


async def test_an_observer_that_fails_to_start_leaves_the_old_one(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fwk_observability.prometheus.observer import PrometheusObserver

    before = list(board.parts.observers._listeners)
    with monkeypatch.context() as patch:

        def fail(self: Observer, context: Any) -> None:
            raise OSError("/secret/path is not there")

        patch.setattr(PrometheusObserver, "__init__", fail)
        with pytest.raises(RequestFailed) as caught:
            await board.switch("observers", "prometheus")
    assert "/secret" not in str(caught.value)
    assert board.parts.observers._listeners == before
    assert "/metrics" in board.paths


class Hello(Options):
    hello_text: str = option("", "What it says.")


@pytest.mark.parametrize("package", ["acme", "fwk"])
async def test_a_dialect_that_cannot_be_imported_ends_the_start_only_where_it_was_asked_for(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    lost = DialectSpec(name="hello", load="nowhere:Nothing", options=Hello)
    needy = DialectSpec(name="needy", load="nowhere:Nothing", needs=Needs(packages=("rocket>=3",)))

    def found(*specs: DialectSpec) -> PluginSet:
        points = [FakeEntryPoint("acme.x", plugin(*specs, hook="dialects"), package)]
        return discover(points=[*entry_points(group="fwk"), *points])  # type: ignore[list-item]

    said = f"plugin 'acme.x' from {package} 1.0 failed to import nowhere:Nothing: ModuleNotFoundError"
    board = Board(found(lost), hello_text="hi")
    with pytest.raises(PluginLoadError, match=re.escape(said)):
        await board.start()
    await board.stop()
    plugins = found(lost, needy) if package == "acme" else found(lost)
    board = Board(plugins, **({"enable_plugin": ["acme"]} if package == "acme" else {}))
    if package == "fwk":
        with pytest.raises(PluginLoadError, match=re.escape(said)):
            await board.start()
    else:
        await board.start()
        assert "dialects.openai" in board.running.active()
        told = [broken.sentence() for broken in plugins.broken]
        assert any(said in sentence for sentence in told)
        assert any("needs the package rocket>=3" in sentence for sentence in told)
        assert all(any(sentence in line for line in caplog.messages) for sentence in told)
    await board.stop()


async def test_nothing_is_switched_while_the_engines_start() -> None:
    board = Board()
    await board.running.start()
    with pytest.raises(InvalidRequest, match="are starting"):
        await board.switch("schedulers", "sjf")
    await board.stop()


def test_two_owners_of_one_route_are_told_apart() -> None:
    app = FastAPI()
    routes = RouteRegistry(app, Keys(None, "admin"))

    def add(app: FastAPI) -> None:
        app.add_api_route("/a", lambda: "a", methods=["GET"])

    routes.register("dialects.one", add)
    with pytest.raises(Exception, match=r"dialects.two and dialects.one both answer GET /a"):
        routes.register("dialects.two", add)
    routes.remove("dialects.one")
    routes.register("dialects.two", add)
    assert [getattr(route, "path", "") for route in app.router.routes].count("/a") == 2  # GET, HEAD
