"""What a feature's part in a worker is told of models and of the time between two steps, and options that it owns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fwk
from fwk import ExpertPlacerSpec, FeatureSpec, Options, SamplingParams, hookimpl, option
from fwk.config import EngineOptions
from fwk.errors import ConfigError, FwkError
from fwk.interfaces.expert_placement import ExpertPlacerContext
from fwk.interfaces.feature import EnginePart, LoadedModel, ModelBuild, Wire, WorkerPart, WorkerPartContext
from fwk.interfaces.model import ModelContext
from fwk.plugins import PluginSet, build_config, discover
from fwk.plugins.selection import option_value
from fwk.types import NewSequence
from fwk_kit.testing.serving import TINY

TOLD: list[tuple[Any, ...]] = []
"""What the part was told, in order."""


class ProbeOptions(Options):
    """Options of ``features.probe``."""

    enable_probe: bool = option(False, "Turn it on.")
    probe_depth: int = option(3, "How deep.", needs="enable_probe", ge=1)
    probe_alone: bool = option(False, "Turn it on for itself alone.")
    probe_algorithm: str = option("auto", "What it chooses with.")


class ProbeSpec(FeatureSpec):
    """Not for runs that are deterministic."""

    def conflict(self, options: Any, engine: EngineOptions) -> str | None:
        deep = engine.enable_deterministic_inference and options.probe_depth > 5
        return "--probe-depth: too deep for --enable-deterministic-inference" if deep else None


class Probe(WorkerPart):
    """Notes what it is told."""

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        TOLD.append(("built", context.options.probe_depth))
        self._count = 0

    def model_context(self, context: ModelContext, build: ModelBuild) -> str:
        self._count += 1
        context.made[self.context.name] = self._count
        TOLD.append(("context", build.role, build.loader, build.can_reread, context.config.num_layers))
        return "probed"

    def model_loaded(self, loaded: LoadedModel) -> None:
        TOLD.append(("loaded", type(loaded.model).__name__, loaded.made[self.context.name]))

    def warmed_up(self) -> None:
        TOLD.append(("warmed up",))

    def between_steps(self) -> None:
        TOLD.append(("between",))

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"choose": self._choose}

    def _choose(self, name: str) -> str:
        assert self.context.plugins is not None
        return type(self.context.plugins.choose("expert_placers", name, ExpertPlacerContext)).__name__


class Plugin:
    """Its declaration. runners: as in ``FeatureSpec``."""

    def __init__(self, runners: tuple[str, ...] = ("generate",)) -> None:
        self._runners = runners

    @hookimpl
    def features(self) -> list[FeatureSpec]:
        return [
            ProbeSpec(
                name="probe",
                worker=f"{__name__}:Probe",
                options=ProbeOptions,
                enabled_by=("enable_probe", "probe_alone"),
                runners=self._runners,
            )
        ]


class Concerned(msgspec.Struct):
    """Every sequence is."""


class All(EnginePart):
    """Has a part in every sequence."""

    def concerns(self, request: Any) -> bool:
        return True

    def new(self, sequence: Any) -> Concerned:
        return Concerned()


class Foresight(WorkerPart):
    """Says what comes after a prompt, by its first token; from when on it was told of the sequence."""

    known: Mapping[int, Sequence[int]] = {}

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._slots: dict[int, tuple[list[int], int]] = {}
        self._steps = 0

    def begin(self, new: NewSequence, asked: Any) -> None:
        assert isinstance(asked, Concerned)
        self._slots[new.slot] = list(self.known.get(new.token_ids[0], ())), 0

    def forget(self, slot: int) -> None:
        del self._slots[slot]

    def next_tokens(self, slot: int) -> Sequence[int]:
        tokens, count = self._slots[slot]
        self._slots[slot] = tokens, count + 1
        return tokens[1:] if count == 0 else ()

    def between_steps(self) -> None:
        self._steps += 1

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"steps": lambda: self._steps}


class Foreseeing:
    """Its declaration."""

    @hookimpl
    def features(self) -> list[FeatureSpec]:
        return [
            FeatureSpec(
                name="foresight",
                engine=f"{__name__}:All",
                worker=f"{__name__}:Foresight",
                wire=Wire(sequence=Concerned),
            )
        ]


def installed(*runners: str) -> PluginSet:
    plugins = discover()
    plugins.register(Plugin(runners or ("generate",)), "features.probe", "acme", "1")
    return plugins


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    TOLD.clear()
    yield
    TOLD.clear()


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def started(model: str, plugins: PluginSet, **options: Any) -> fwk.LLM:
    return fwk.LLM(model, load_format="dummy", plugins=plugins, max_total_tokens=512, enable_probe=True, **options)


def test_models_and_steps(model: str) -> None:
    """Also of other weights, whose part of what was made comes back with them."""
    with started(model, installed(), probe_depth=4) as llm:
        first = ("context", "served", "dummy", True, TINY["num_hidden_layers"])
        assert TOLD[:2] == [("built", 4), first]
        assert [told[0] for told in TOLD[2:]] == ["loaded", "warmed up"]
        del TOLD[:]
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
        assert TOLD == [("between",)] * 5
        del TOLD[:]
        llm.engine.executor.call("features.weight_update.prepare", model, "dummy")
        llm.engine.executor.call("features.weight_update.discard")
        assert list(TOLD) == [first]
        llm.engine.executor.call("features.weight_update.prepare", model, "dummy")
        llm.engine.executor.call("features.weight_update.use")
        assert [told[0] for told in TOLD] == ["context", "context", "loaded", "warmed up"]
        assert TOLD[2][2] == 3
        assert llm.engine.executor.call("features.probe.choose", "deepseek") == ["DeepSeekPlacer"]
        with pytest.raises(FwkError, match="unknown expert placement algorithm 'acme'"):
            llm.engine.executor.call("features.probe.choose", "acme")


@pytest.mark.gate(1)
@pytest.mark.parametrize("num_right", [6, 3, 0])
def test_what_is_known_to_come_is_verified_in_one_step(
    model: str, num_right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of a feature, right ones up to a place; of another sequence nothing is known."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5]]
    plugins = discover()
    plugins.register(Foreseeing(), "features.foresight", "acme", "1")
    with fwk.LLM(model, load_format="dummy", max_total_tokens=512) as llm:
        wanted = [done.token_ids for done in llm.generate(prompts, sampling)]
    right = wanted[0][: 1 + num_right]
    told = [*right, *((token + 1) % 200 for token in wanted[0][len(right) :])]
    monkeypatch.setattr(Foresight, "known", {1: told})
    for asked, saved in ((prompts[:1], num_right), (prompts, 0)):
        options: dict[str, Any] = {"max_total_tokens": 512, "check_blocks": True, "enable_plugin": ["foresight"]}
        with fwk.LLM(model, load_format="dummy", plugins=plugins, **options) as llm:
            assert [done.token_ids for done in llm.generate(asked, sampling)] == wanted[: len(asked)]
            assert llm.engine.executor.call("features.foresight.steps") == [8 - saved]
            assert llm.engine.stats().accepted_draft_tokens == num_right


def test_models_that_do_not_generate(model: str) -> None:
    with pytest.raises(ConfigError, match="it has a part in steps of models that generate"):
        started(model, installed(), task="embed")
    with started(model, installed("generate", "pool"), task="embed") as llm:
        assert [told[0] for told in TOLD] == ["built", "context", "loaded", "warmed up"]
        llm.embed([[1, 2, 3]])
        assert TOLD[4:] == [("between",)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"probe_alone": True, "probe_depth": 4}, "--probe-depth does nothing without --enable-probe: add it"),
        ({"probe_depth": 4}, "--probe-depth does nothing without --enable-probe: add it"),
        ({"probe_algorithm": "x"}, "belongs to features.probe, which is off: turn it on with --enable-probe or --pr"),
        (
            {"enable_probe": True, "probe_depth": 6, "enable_deterministic_inference": True},
            "--probe-depth: too deep for --enable-deterministic-inference",
        ),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(installed(), given)


def test_an_option_is_found_at_its_owner() -> None:
    plugins = installed()
    config = build_config(plugins, {"enable_probe": True, "probe_algorithm": "mine", "page_size": 8})
    assert option_value(config, plugins, "probe_algorithm") == "mine"
    assert option_value(config, plugins, "probe_depth") == 3
    assert option_value(config, plugins, "page_size") == 8
    assert option_value(config, plugins, "nobodys") is None


def test_a_family_whose_option_nobody_installed() -> None:
    """An algorithm without the feature that would ask it: nothing chooses it, and nothing fails."""

    class Alone:
        @hookimpl
        def expert_placers(self) -> list[ExpertPlacerSpec]:
            return [ExpertPlacerSpec(name="mine", load="nowhere:Nothing")]

    plugins = discover(points=[])
    plugins.register(Alone(), "expert_placers.mine", "acme", "1")
    assert build_config(plugins, {}).plugin_options == {}
    with pytest.raises(ConfigError, match="unknown option --eplb-algorithm"):
        build_config(plugins, {"eplb_algorithm": "mine"})
