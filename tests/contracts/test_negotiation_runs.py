"""No refused combination of plugins ever runs, and every accepted one serves a tiny model.

A third party's attention backend declares bounds drawn at random, and looks for itself, in every layer of every step,
whether it was put outside of them. What should be refused is worked out here anew, without the solver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import fwk
import fwk_native as native
from fwk import Ask, AttentionBackendSpec, ExecutorSpec, Limit, SamplingParams, hookimpl
from fwk.errors import FwkError
from fwk.plugins import PluginSet, discover
from fwk.worker.worker import LocalWorker
from fwk_attention.torch_sdpa.backend import TorchBackend
from fwk_executors.inprocess.executor import InProcessExecutor

PROMPTS = [[7, 8, 9, 10] * 6, [5, 6]]
GRAPHS = "acme_graphs"
VALUES: dict[str, tuple[object, ...]] = {
    "kv_dtype": ("auto", "int8"),
    "block_size": (8, 16),
    "head_size": (16, 32),
    "dtype": ("float32", "bfloat16"),
    "drafts": ("none", "chain", "tree"),
    "lora": ("none", "torch"),
    "cache": ("none", "radix", "hierarchical"),
    "quant": ("none", "int8"),
    "executors": ("inprocess", "threaded", "replaying"),
}
"""What a run may be like: by the names limits know."""

TORCH = frozenset({"sliding_window", "tree_mask"})
"""What both of our backends that run here can do, in every K/V format of a run."""


@dataclass(frozen=True)
class Case:
    """A run, whether its model has a sliding window, the attention asked for, and what the third party declares."""

    run: dict[str, Any]
    has_window: bool
    attention: str
    rank: int
    features: frozenset[str]
    kv_dtypes: tuple[str, ...]
    limits: dict[str, tuple[object, ...]] = field(default_factory=dict[str, tuple[object, ...]])

    @property
    def asked(self) -> set[str]:
        """Abilities that attention must have."""
        asked = {"sliding_window"} if self.has_window else set[str]()
        asked |= {"tree_mask"} if self.run["drafts"] == "tree" else set()
        return asked | ({GRAPHS} if self.run["executors"] == "replaying" else set())

    def broken(self) -> str | None:
        """What the third party could not do in this run, worked out without the solver."""
        if not self.asked <= self.features:
            return "features"
        if self.run["kv_dtype"] not in self.kv_dtypes:
            return "kv_dtype"
        return next((fact for fact, values in self.limits.items() if self.run[fact] not in values), None)

    def is_possible(self) -> bool:
        """Whether any backend can serve."""
        ours = self.asked <= TORCH
        able = {"third": self.broken() is None, "torch": ours, "cpu": ours and native.refusal() is None}
        return able[self.attention] if self.attention in able else any(able.values())

    def options(self) -> dict[str, Any]:
        run = self.run
        options: dict[str, Any] = {
            "attention_backend": self.attention,
            "kv_cache_dtype": run["kv_dtype"],
            "page_size": run["block_size"],
            "dtype": run["dtype"],
            "prefix_cache": run["cache"],
            "quantization": run["quant"],
            "executor": run["executors"],
            "enable_lora": run["lora"] != "none",
            "json_model_override_args": f'{{"head_dim": {run["head_size"]}'
            + (', "sliding_window": 16, "architectures": ["MistralForCausalLM"]}' if self.has_window else "}"),
        }
        if run["drafts"] != "none":
            options["speculative_algorithm"] = "ngram"
        if run["drafts"] == "tree":
            options["speculative_ngram_max_bfs_breadth"] = 3
        return options


CURRENT: list[Case] = []


class Third(TorchBackend):
    """Complains when it is used outside of what it declared."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.case = CURRENT[-1]
        assert self.case.broken() is None
        assert context.kv_dtype in self.case.kv_dtypes

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any) -> Any:
        assert layer.sliding_window is None or "sliding_window" in self.case.features
        assert batch.tree_mask is None or "tree_mask" in self.case.features
        assert layer.head_size in self.case.limits.get("head_size", VALUES["head_size"])
        assert self.context.block_size in self.case.limits.get("block_size", VALUES["block_size"])
        return super().forward(q, k, v, layer, batch)


class Replaying(InProcessExecutor):
    """As if it recorded steps: it asks attention to stand that."""


class Package:
    """The third party, with what the case says."""

    def __init__(self, case: Case) -> None:
        self._case = case

    @hookimpl
    def attention_backends(self) -> list[AttentionBackendSpec]:
        case = self._case
        limits = tuple(Limit(fact, values, "says the third party") for fact, values in case.limits.items())
        return [
            AttentionBackendSpec(
                name="third",
                load=f"{__name__}:Third",
                rank=case.rank,
                kv_dtypes=case.kv_dtypes,
                features=case.features,
                limits=limits,
            )
        ]

    @hookimpl
    def executors(self) -> list[ExecutorSpec]:
        asks = (Ask("attention", frozenset({GRAPHS})),)
        return [ExecutorSpec(name="replaying", load=f"{__name__}:Replaying", asks=asks, rank=-9)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    run = {name: draw(st.sampled_from(values)) for name, values in VALUES.items()}
    limits = {
        fact: tuple(draw(st.lists(st.sampled_from(VALUES[fact]), min_size=1, unique=True)))
        for fact in draw(st.lists(st.sampled_from(list(VALUES)), max_size=3, unique=True))
    }
    features = draw(st.lists(st.sampled_from(["sliding_window", "tree_mask", GRAPHS]), unique=True))
    return Case(
        run,
        draw(st.booleans()),
        draw(st.sampled_from(["auto", "third", "third", "torch", "cpu"])),
        draw(st.sampled_from([-50, 50])),
        frozenset(features),
        draw(st.sampled_from([("auto",), ("auto", "int8")])),
        limits,
    )


@pytest.fixture(scope="module")
def loads() -> Iterator[list[str]]:
    """A note for every time a worker begins to load."""
    found: list[str] = []
    load = LocalWorker.load

    def noted(self: LocalWorker) -> Any:
        found.append("load")
        return load(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWorker, "load", noted)
        yield found


def start(case: Case, folder: Path, plugins: PluginSet) -> fwk.LLM | FwkError:
    """The engine, or why there is none."""
    limits = {"max_total_tokens": 512, "max_running_requests": 4, "check_blocks": True}
    try:
        return fwk.LLM(str(folder), load_format="dummy", plugins=plugins, **limits, **case.options())  # type: ignore[arg-type]
    except FwkError as error:
        return error


def check(case: Case, folder: Path, loads: list[str]) -> None:
    """Start, and serve if it starts; hold both against what should be."""
    plugins: PluginSet = discover()
    plugins.register(Package(case), "attention.third", "acme", "1")
    CURRENT.append(case)
    loads.clear()
    found = start(case, folder, plugins)
    if isinstance(found, FwkError):
        event("refused")
        assert not case.is_possible(), f"refused what could be served: {found}"
        assert loads == [], "refused after loading"
        assert "\n" not in str(found)
        assert "third" in str(found) or case.attention != "third"
        return
    llm = found
    with llm:
        chosen = llm.engine.info.chosen
        event(f"served by {chosen['attention']}")
        assert case.is_possible(), f"accepted what nobody can serve: {chosen}"
        if case.attention == "auto" and case.rank > 0:
            assert (chosen["attention"] == "third") == (case.broken() is None)
            named = [reason for reason in llm.engine.info.reasons if "'third' was not taken: it " in reason]
            assert bool(named) == (case.broken() is not None)
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        assert [len(output.token_ids) for output in outputs] == [6, 6]


QUICK = settings(
    max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)


@QUICK
@given(case=cases())
def test_a_few(case: Case, tiny_folder: Path, loads: list[str]) -> None:
    check(case, tiny_folder, loads)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@settings(QUICK, max_examples=600)
@given(case=cases())
def test_many(case: Case, tiny_folder: Path, loads: list[str]) -> None:
    check(case, tiny_folder, loads)
