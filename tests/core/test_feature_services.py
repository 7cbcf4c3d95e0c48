"""What core gives features' parts: blocks, the KV cache, plugins of other families, and a say before the start."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from tests.helpers.fake_plugins import FakeEntryPoint, plugin
from tests.helpers.fake_plugins import of as of_plugins
from tests.helpers.scheduling import ask, batches, finish

import fwk
from fwk import FeatureSpec, Options, option
from fwk.config import Config
from fwk.errors import ConfigError, EngineDead, InvalidRequest, PluginError
from fwk.features.declared import check_server
from fwk.features.engine import EngineFeatures
from fwk.features.server import RequestFeatures, build_server_features
from fwk.features.wire import Reader, packed
from fwk.interfaces.feature import (
    EnginePart,
    EnginePartContext,
    FeatureRun,
    RequestPart,
    ServerPart,
    ServerPartContext,
    Wire,
    WorkerCache,
    WorkerPart,
)
from fwk.interfaces.kv_transfer import KVTransferContext
from fwk.plugins import PluginFactory, PluginSet, build_config, discover
from fwk.server.model_engines import ModelEngines
from fwk.types import Request, SamplingParams
from fwk_kit.testing.fake_engine import make_engine
from fwk_kit.testing.serving import TINY

pytestmark = pytest.mark.usefixtures("one_thread")


class Asked(msgspec.Struct, frozen=True):
    """Nothing but that it was asked."""


FEATURES = {"mine": packed(Asked())}


# In the engine.


class Keeping(EnginePart):
    """Holds the blocks of what has ended, fills some for what waits, and tells of none that they were cached."""

    def __init__(self, engine: Any) -> None:
        blocks = engine.scheduler._kv_blocks.reservations
        super().__init__(EnginePartContext("mine", lambda *args: [], Wire(request=Asked), blocks=blocks, block_size=4))
        self.blocks, self.num_planned, self.told = blocks, 0, []  # type: ignore[var-annotated]
        self.held: list[Any] = []

    def planning(self) -> None:
        self.num_planned += 1

    def finished(self, sequence: Any) -> None:
        self.held.append(self.blocks.hold(sequence, sequence.num_prompt_tokens))

    def cached(self, sequence: Any, count: int) -> int:
        self.told.append(count)
        return 1

    def lets_through(self, sequence: Any) -> bool:
        if sequence.key[0] == "filled" and not self.told[1:]:
            match = self.blocks.match(sequence)
            reserved = self.blocks.reserve(match, sequence.token_ids, sequence.num_matchable_tokens // 4)
            self.blocks.settle(reserved, has_arrived=True)
        return True


@pytest.fixture
def engine() -> Any:
    made = make_engine(num_blocks=40, block_size=4)
    made.scheduler.parts = made.scheduler._queue._parts = EngineFeatures([Keeping(made)])
    return made


def test_held_blocks_outlive_their_sequence(engine: Any) -> None:
    [part] = engine.scheduler.parts.all
    ask(engine, "one", prompt=10, max_tokens=1, features=FEATURES)
    while engine.has_work:
        engine.step()
    [held] = part.held
    assert len(held.block_ids) == 2, "the full ones of ten tokens"
    assert engine.stats().num_held_blocks == 2
    engine.scheduler.check()
    part.blocks.let_go(held)
    assert engine.stats().num_held_blocks == 0
    ask(engine, "short", prompt=3, features=FEATURES)
    finish(engine)
    assert part.held[1:] == [None]
    assert part.num_planned > 2


def test_filled_blocks_are_what_a_sequence_starts_with(engine: Any) -> None:
    """Their tokens are not computed, and the client is told what the part says."""
    [part] = engine.scheduler.parts.all
    part.told.append(0)
    ask(engine, "filled", prompt=11, features=FEATURES)
    events = []
    while engine.has_work:
        events += engine.step()
    assert part.told == [0, 8]
    assert {event.cached_tokens for event in events} == {1}
    assert batches(engine)[0].sequences[0].num_new_tokens == 3


# In the server.


class Entering(RequestPart):
    def __init__(self, sends: bool = False, space: str = "") -> None:
        self.sends, self.space = sends, space

    async def enter(self, item: Any) -> Asked | None:
        self.namespace = self.space
        return Asked() if self.sends else None


def test_a_part_knows_which_others_have_a_part_in_a_request() -> None:
    parts = {"silent": Entering(), "space": Entering(space="x"), "sends": Entering(sends=True), "last": Entering()}
    made = RequestFeatures([(name, 5.0, part) for name, part in parts.items()], Reader({}), waits=True)
    asyncio.run(made.enter(None))
    assert [part.others for part in parts.values()] == [(), (), ("space",), ("space", "sends")]


class Serving(ServerPart):
    async def engines_ready(self) -> None:
        raise ConfigError(f"{self.context.name} is not ready")

    def trouble(self) -> str | None:
        return f"{self.context.name} has trouble" if self.context.model_name == "troubled" else None


def test_a_server_part_may_end_the_start_and_tells_of_trouble() -> None:
    plugins = of_plugins(*(FeatureSpec(name=name, server=f"{__name__}:Serving") for name in ("one", "two")))
    named = {"features.one": {}, "features.two": {}}
    for model, told in (("fine", None), ("troubled", "one has trouble; two has trouble")):
        context = partial(ServerPartContext, model_name=model, text=None)
        parts = build_server_features(PluginFactory(plugins, named), context, lambda *args: None)
        assert parts.trouble() == told
        with pytest.raises(ConfigError, match="one is not ready"):
            asyncio.run(parts.ready())


# Before anything starts, and in the workers.


class MineOptions(Options):
    mine_mode: str = option("off", "On if it is anything else.")
    mine_transport: str = option("auto", "Of kv_transfer.")


class Seeing(WorkerPart):
    """Keeps what it has seen of the KV cache."""

    seen: ClassVar[list[Any]] = []

    def cache_allocated(self, cache: WorkerCache) -> None:
        assert self.context.plugins is not None
        transport = self.context.plugins.choose(
            "kv_transfer", "auto", KVTransferContext, kv_caches=[], block_size=4, secret=b"x" * 16
        )
        self.seen[:] = [cache, type(transport).__name__, dict(cache.in_common())]
        transport.close()


@dataclass(frozen=True, kw_only=True)
class MineSpec(FeatureSpec):
    def check_run(self, run: FeatureRun, options: MineOptions) -> None:
        if run.chosen["cache"].name == "none":
            raise ConfigError(f"mine in {options.mine_mode} needs a cache for {run.model}, with {sorted(run.features)}")

    def check_server(self, configs: Any, options: MineOptions) -> None:
        if len(configs) > 1:
            raise ConfigError("mine is for one model")


def mine(**fields: Any) -> PluginSet:
    from importlib.metadata import entry_points

    spec = MineSpec(
        name="mine", worker=f"{__name__}:Seeing", options=MineOptions, enabled_by=("mine_mode",),
        uses=(("kv_transfer", "mine_transport"),), **fields,
    )  # fmt: skip
    points: list[Any] = [point for point in entry_points(group="fwk") if point.dist and point.dist.name == "fwk"]
    return discover(points=[*points, FakeEntryPoint("features.mine", plugin(spec, hook="features"))])  # type: ignore[list-item]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    Seeing.seen.clear()
    return str(tmp_path)


OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "max_total_tokens": 256, "max_running_requests": 4, "page_size": 4, "mine_mode": "on",
}  # fmt: skip


def test_a_worker_part_sees_the_kv_cache_and_builds_what_it_uses(folder: str) -> None:
    with fwk.LLM(folder, plugins=mine(), **OPTIONS) as llm:
        cache, transport, in_common = Seeing.seen
        assert (cache.num_blocks, cache.block_size, transport) == (64, 4, "TcpTransfer")
        assert [layer.kv_cache.shape[0] for layer in cache.layers] == [64] * TINY["num_hidden_layers"]
        assert llm.engine.info.chosen["kv_transfer"] == "tcp"
        assert "--page-size" in in_common
    assert json.loads(in_common["the options of features.mine"]) == {"mine_mode": "on"}
    with fwk.LLM(folder, plugins=mine(changes_kv=False), **OPTIONS):
        assert "the options of features.mine" not in Seeing.seen[2]


def test_what_moves_blocks_keeps_the_weights(folder: str) -> None:
    with (
        fwk.LLM(folder, plugins=mine(moves_blocks="mine moves K/V"), **OPTIONS) as llm,
        pytest.raises(InvalidRequest, match="the weights stay as they are: mine moves K/V, which must be of the same"),
    ):
        llm.update_weights("other")


def test_a_run_or_a_server_is_refused_before_anything_is_loaded(folder: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"mine in on needs a cache for .*, with .*'mine'",
    ):
        fwk.LLM(folder, plugins=mine(), prefix_cache="none", **OPTIONS)
    with pytest.raises(PluginError, match="unknown KV transfer 'nowhere'"):
        fwk.LLM(folder, plugins=mine(), mine_transport="nowhere", **OPTIONS)
    with pytest.raises(ConfigError, match=r"--mine-mode on is for fwk serve: fwk\.LLM has no server"):
        fwk.LLM(folder, plugins=mine(needs_server=True), **OPTIONS)
    plugins = mine()
    for mode, is_on in (("off", False), ("on", True)):
        configs = [build_config(plugins, {"model": "x", "mine_mode": mode})] * 2
        if is_on:
            with pytest.raises(ConfigError, match="mine is for one model"):
                check_server(configs, plugins)
        else:
            check_server(configs, plugins)
    assert Seeing.seen == []


def test_what_it_uses_is_named_by_an_option_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"uses names no option of its own: \{'other'\}"):
        FeatureSpec(name="mine", worker="x:Y", options=MineOptions, uses=(("kv_transfer", "other"),))


# All engines at once.


class Told:
    """Stands for an engine's client: agrees to everything."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def call_feature(self, feature: str, operation: str, arguments: Any) -> str:
        self.told.append(f"{feature}.{operation}")
        return "done"


class Pool:
    """Engines, and requests that end when they are aborted."""

    def __init__(self) -> None:
        self.engines: list[Any] = [Told(), Told()]
        self.aborted: list[str] = []

    use = staticmethod(nullcontext)

    def submit(self, request: Any, receiver: Any) -> None:
        self.receiver = receiver

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append(request_id)

    def forget(self, request_id: str) -> None:
        pass


@pytest.fixture
def model() -> tuple[ModelEngines, Any, Any]:
    """Engines of a model, their pool, and what tells an engine that starts of things."""
    begins: list[Any] = []
    pool: Any = Pool()
    return ModelEngines(Config(), lambda begin: begins.append(begin) or pool), pool, begins[0]


@pytest.mark.parametrize("aborts", [True, False])
async def test_a_change_of_all_engines_waits_for_requests_and_has_later_ones_wait(model: Any, aborts: bool) -> None:
    engines, pool, begin = model
    request = Request(request_id="open", prompt_token_ids=[1], sampling=SamplingParams())
    async with engines.use():
        engines.submit(request, print)
    came: list[str] = []

    async def late() -> None:
        async with engines.use():
            came.append("late")

    async with engines.exclusive("mine") as held:
        assert await held.ask("prepare") == ["done", "done"]
        draining = asyncio.create_task(held.drain(aborts=aborts))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(late())
        await asyncio.sleep(0.05)
        assert not draining.done(), "a request is under way"
        assert pool.aborted == ["open"] * aborts
        engines.forget("open")
        await draining
        assert held.num_waiting() == 1
        beginning = asyncio.create_task(begin(Told()))
        await held.ask("use")
        await asyncio.sleep(0.05)
        assert not came
        assert not beginning.done(), "an engine that starts meanwhile serves with nothing of before"
    await asyncio.gather(waiting, beginning)
    assert came == ["late"]
    assert [engine.told for engine in pool.engines] == [["mine.prepare", "mine.use"]] * 2


async def test_an_engine_that_was_told_before_a_change_starts_again(model: Any) -> None:
    engines, _, begin = model
    goes_on = asyncio.Event()

    async def tell(call: Any) -> None:
        await goes_on.wait()

    engines.on_begin = tell
    beginning = asyncio.create_task(begin(Told()))
    await asyncio.sleep(0)
    async with engines.exclusive("mine") as held:
        await held.drain()
    goes_on.set()
    with pytest.raises(EngineDead, match="the other engines were changed while it started"):
        await beginning
    await begin(Told())


async def test_nothing_is_changed_where_an_engine_came_or_went(model: Any) -> None:
    engines, pool, _ = model
    async with engines.exclusive("mine") as held:
        pool.engines = pool.engines[:1]
        with pytest.raises(EngineDead, match="ended or started meanwhile: nothing was changed"):
            await held.drain()
    async with engines.use(), engines.exclusive("mine"):
        pass
