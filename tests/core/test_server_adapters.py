"""LoRA adapters in the API process: one for all engines or none, and what clients are told of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fwk import SamplingParams
from fwk.config import Config, EngineOptions
from fwk.errors import EngineDead, InvalidRequest
from fwk.interfaces.balance import BalanceContext, LoadBalancer
from fwk.interfaces.dialect import GenerateInput, ModelCard
from fwk.server import replicas as module
from fwk.server.frontend import ServerFrontend
from fwk.server.observer_dispatch import Observers
from fwk.server.replicas import Replicas
from fwk.text.prompt_limits import PromptLimits
from fwk.types import AdapterInfo, GrammarRequest


class Client:
    """An engine that answers as it is told to, or remembers what it has."""

    def __init__(self, config: Config, fingerprint: str, replica: int, process: object = None) -> None:
        self.names: set[str] = set()
        self.wrong: Exception | None = None
        self.key = "k"
        self.is_dead = False
        self.on_stats: Any = None
        self.problem: str | None = None
        self.has_started = True

    def trouble(self) -> str | None:
        return self.problem

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        if self.wrong is not None:
            raise self.wrong
        self.names.add(name)
        return AdapterInfo(name, self.key, path, 4)

    async def unload_adapter(self, name: str) -> AdapterInfo:
        if self.wrong is not None:
            raise self.wrong
        self.names.remove(name)
        return AdapterInfo(name, self.key, "", 4)


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    made: list[Client] = []

    def make(*arguments: Any) -> Client:
        made.append(Client(*arguments))
        return made[-1]

    monkeypatch.setattr(module, "EngineClient", make)
    return made


@pytest.fixture
def engines(clients: list[Client]) -> Replicas:
    class First(LoadBalancer):
        def choose(self, request: Any, replicas: Any) -> Any:
            return replicas[0]

    return Replicas(Config(engine=EngineOptions(data_parallel_size=3)), "f", First(BalanceContext(3)))


@pytest.fixture
def frontend(engines: Replicas) -> Any:
    text: Any = SimpleNamespace(limits=PromptLimits())
    grammars: Any = SimpleNamespace(kinds=frozenset(), check=lambda grammar: None, use=lambda name: None)
    plugins: Any = SimpleNamespace(family=lambda name: [])
    frontend = ServerFrontend(
        ModelCard("tiny", "p", 1, 64, 320), text, engines, plugins, Observers(), {}, grammars, text
    )
    source: Any = SimpleNamespace(is_open=True, find=lambda name: Path("/told") / name if name != "lost" else None)
    frontend.lora_sources = [source]
    yield frontend
    frontend.close()


def names(clients: list[Client]) -> list[set[str]]:
    return [client.names for client in clients]


async def test_every_engine_loads_it_or_none(engines: Replicas, clients: list[Client]) -> None:
    assert (await engines.load_adapter("a", "/a")).key == "k"
    assert names(clients) == [{"a"}] * 3
    clients[1].wrong = InvalidRequest("no room", "lora_name")
    with pytest.raises(InvalidRequest, match="no room"):
        await engines.load_adapter("b", "/b")
    clients[1].wrong, clients[1].key = None, "other"
    with pytest.raises(InvalidRequest, match="its files changed meanwhile"):
        await engines.load_adapter("b", "/b")
    assert names(clients) == [{"a"}] * 3


async def test_engines_that_die_meanwhile(engines: Replicas, clients: list[Client]) -> None:
    clients[1].wrong = EngineDead("gone")
    await engines.load_adapter("a", "/a")
    assert names(clients) == [{"a"}, set(), {"a"}]
    await engines.unload_adapter("a")
    assert names(clients) == [set()] * 3
    for client in clients:
        client.wrong = EngineDead("gone")
    for work in (engines.load_adapter("a", "/a"), engines.unload_adapter("a")):
        with pytest.raises(EngineDead):
            await work


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


def test_a_request_that_comes_before_the_engines_have_loaded_it_is_early(
    frontend: ServerFrontend, clients: list[Client]
) -> None:
    frontend.expect_adapter("a")
    assert list(frontend.adapters) == ["a"]
    item = GenerateInput([1], SamplingParams(max_tokens=1), adapter="a")
    for client in clients:
        client.problem = "the engine is starting"
    with pytest.raises(EngineDead, match="starting"):
        frontend.check(item)
    for client in clients:
        client.problem = None
    frontend.add_adapter(AdapterInfo("a", "k", "/a", 4), "a")
    assert frontend.check(item).adapter == "a"


def test_a_grammar_asked_for_before_the_engines_have_settled_on_a_backend_is_early(
    frontend: ServerFrontend, clients: list[Client]
) -> None:
    for client in clients:
        client.problem = "the engine is starting"
    assert "json_object" in frontend.grammar_kinds, "no dialect may say that there is no backend"
    grammar = GrammarRequest("json_object")
    with pytest.raises(EngineDead, match="starting"):
        frontend.check(GenerateInput([1], SamplingParams(max_tokens=1, grammar=grammar)))
    frontend.use_grammars("none")
    assert not frontend.grammar_kinds
