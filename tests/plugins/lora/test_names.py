"""Adapters in the server: one for all engines or none, and what clients are told of them."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.pools import replicas_of

from fwk import SamplingParams
from fwk.config import Config
from fwk.errors import ConfigError, EngineDead, InvalidRequest
from fwk.features.server import ServerFeatures, _Built
from fwk.interfaces.balance import BalanceContext, LoadBalancer
from fwk.interfaces.dialect import GenerateInput, ModelCard
from fwk.interfaces.feature import ServerPartContext
from fwk.server.frontend import ServerFrontend
from fwk.server.model_engines import ModelEngines
from fwk.server.observer_dispatch import Observers
from fwk.text.prompt_limits import PromptLimits
from fwk_lora.feature import Adapted, LoRAOptions
from fwk_lora.feature.server import AdapterNames


class Client:
    """An engine that answers as it is told to, or remembers what it has."""

    def __init__(self, config: Config, fingerprint: str, replica: int, count: int, process: object = None) -> None:
        self.names: set[str] = set()
        self.wrong: Exception | None = None
        self.key = "k"
        self.first: set[str] = set()
        self.is_dead = False
        self.on_stats: Any = None
        self.problem: str | None = None
        self.has_started = True

    def trouble(self) -> str | None:
        return self.problem

    async def call_feature(self, feature: str, operation: str, arguments: Any) -> Any:
        assert feature == "lora"
        if operation == "adapters":
            return [[name, self.key, "/first", 4] for name in sorted(self.first)]
        if self.wrong is not None:
            raise self.wrong
        name, *rest = arguments
        if operation == "unload" and name not in self.names:
            raise InvalidRequest(f"no LoRA adapter {name!r} is loaded", "lora_name")
        (self.names.add if operation == "load" else self.names.remove)(name)
        return [name, self.key, *(rest or [""]), 4]


class First(LoadBalancer):
    def choose(self, request: Any, replicas: Any) -> Any:
        return replicas[0]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    return replicas_of(monkeypatch, Client, First(BalanceContext(3)))


@pytest.fixture
def clients(model: Any) -> list[Client]:
    return model[2]


@pytest.fixture
def engines(model: Any) -> ModelEngines:
    return model[0]


class Sources:
    """Finds every name but ``lost``."""

    def build_all(self, family: str, context: Any) -> Any:
        assert family == "lora_sources"
        found = SimpleNamespace(is_open=True, find=lambda name: Path("/told") / name if name != "lost" else None)
        return iter([(None, found)])


def part_for(frontend: Any, engines: ModelEngines, **options: Any) -> AdapterNames:
    """The server's part, which the frontend has from now on."""
    context = ServerPartContext(
        "lora",
        "tiny",
        frontend.text,
        partial(engines.call_feature, "lora"),
        LoRAOptions(enable_lora=True, **options),
        frontend,
        plugins=Sources(),  # type: ignore[arg-type]
    )
    part = AdapterNames(context)
    item: Any = SimpleNamespace(name="lora")
    frontend.parts = ServerFeatures([_Built(item, part, None)], on=["lora"])
    return part


@pytest.fixture
def frontend(engines: ModelEngines) -> Any:
    text: Any = SimpleNamespace(limits=PromptLimits())
    plugins: Any = SimpleNamespace(family=lambda name: [])
    frontend = ServerFrontend(ModelCard("tiny", "p", 1, 64, 320), text, engines, plugins, Observers(), {}, text)
    yield frontend
    frontend.close()


@pytest.fixture
def part(frontend: Any, engines: ModelEngines) -> AdapterNames:
    return part_for(frontend, engines)


def names(clients: list[Client]) -> list[set[str]]:
    return [client.names for client in clients]


async def test_every_engine_loads_it_or_none(part: AdapterNames, clients: list[Client]) -> None:
    await part.load("a", "a")
    assert names(clients) == [{"a"}] * 3
    clients[1].wrong = InvalidRequest("no room", "lora_name")
    with pytest.raises(InvalidRequest, match="no room"):
        await part.load("b", "b")
    clients[1].wrong, clients[1].key = None, "other"
    with pytest.raises(InvalidRequest, match="its files changed meanwhile"):
        await part.load("b", "b")
    assert names(clients) == [{"a"}] * 3
    assert list(part.cards) == ["a"]


async def test_engines_that_die_meanwhile(part: AdapterNames, clients: list[Client]) -> None:
    clients[1].wrong = EngineDead("gone")
    await part.load("a", "a")
    assert names(clients) == [{"a"}, set(), {"a"}]
    await part.unload("a")
    assert names(clients) == [set()] * 3
    clients[1].wrong = None
    await part.load("a", "a")
    for client in clients:
        client.wrong = EngineDead("gone")
    for work in (part.load("b", "b"), part.unload("a")):
        with pytest.raises(EngineDead):
            await work


async def test_an_engine_in_anothers_place_gets_what_that_one_had(
    frontend: ServerFrontend, engines: ModelEngines, clients: list[Client]
) -> None:
    for client in clients:
        client.first = {"x", "y"}
        client.names = {"x", "y"}
    part = part_for(frontend, engines, lora_paths=("x=/x", "y=/y"))
    await part.engines_ready()
    await part.unload("y")
    await part.load("a", "a")
    new = clients[0]
    new.names = {"x", "y"}  # as it has begun

    async def ask(operation: str, *arguments: Any) -> Any:
        return await new.call_feature("lora", operation, arguments)

    await part.engine_begins(ask)
    assert new.names == {"x", "a"}


@pytest.mark.usefixtures("part")
async def test_what_clients_see_of_where_it_came_from(frontend: ServerFrontend) -> None:
    await frontend.load_adapter("a", "threads/a")
    await frontend.load_adapter("b", "/told/b")
    assert {card.name: card.source for card in frontend.adapters.values()} == {"a": "threads/a", "b": "b"}
    for name, source, param in (("x", "lost", "lora_path"), ("tiny", "threads/a", "lora_name")):
        with pytest.raises(InvalidRequest) as raised:
            await frontend.load_adapter(name, source)
        assert raised.value.param == param
    await frontend.unload_adapter("a")
    with pytest.raises(InvalidRequest, match="no LoRA adapter 'a'"):
        await frontend.unload_adapter("a")
    assert list(frontend.adapters) == ["b"]


async def test_a_request_that_comes_before_the_engines_have_loaded_it_is_early(
    frontend: ServerFrontend, engines: ModelEngines, clients: list[Client]
) -> None:
    part = part_for(frontend, engines, lora_paths=("a=/a",))
    assert list(frontend.adapters) == ["a"]
    item = GenerateInput([1], SamplingParams(max_tokens=1), adapter="a")
    for client in clients:
        client.problem = "the engine is starting"
        client.first = {"a"}
    with pytest.raises(EngineDead, match="starting"):
        frontend.check(item)
    for client in clients:
        client.problem = None
    assert frontend.check(item).adapter == "a"
    own = part.open(item, "")
    assert own is not None
    entering = asyncio.ensure_future(own.enter(item))
    await asyncio.sleep(0)
    assert not entering.done(), "its key is not known yet"
    await part.engines_ready()
    assert await entering == Adapted("k")
    assert own.namespace == "k"


def test_without_the_feature_a_request_is_told_what_it_needs(frontend: ServerFrontend) -> None:
    with pytest.raises(InvalidRequest, match="adapter needs the feature 'lora': none of that name is installed"):
        frontend.check(GenerateInput([1], SamplingParams(max_tokens=1), adapter="a"))


@pytest.mark.parametrize("name", ["other", "its-adapter"])
async def test_the_name_of_another_served_model_is_taken(
    frontend: ServerFrontend, engines: ModelEngines, name: str
) -> None:
    part = part_for(frontend, engines)
    await part.load("free", "x")
    card = SimpleNamespace(name="other")
    frontend.join([frontend, SimpleNamespace(card=card, is_called={"other", "its-adapter"}.__contains__)])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match=f"{name!r} is what another served model"):
        await part.load(name, "x")
    assert list(frontend.adapters) == ["free"]


def test_the_models_own_name_is_taken(frontend: ServerFrontend, engines: ModelEngines) -> None:
    with pytest.raises(ConfigError, match="'tiny' is the served model's own name"):
        part_for(frontend, engines, lora_paths=("tiny=/a",))
