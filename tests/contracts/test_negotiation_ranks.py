"""The same as in ``test_negotiation_runs`` on two ranks: no refused combination runs, and every accepted one serves.

Ranks are processes of their own, so the third party is an installed package here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.helpers.packages import import_path, write_metadata

import fwk
from fwk import SamplingParams
from fwk.errors import FwkError
from fwk.plugins import discover

PROMPTS = [[7, 8, 9, 10] * 6, [5, 6]]
DECLARES = """
import json
import re
from pathlib import Path
from fwk import AttentionBackendSpec, Limit, hookimpl

CASE = json.loads((Path(__file__).parent / "case.json").read_text())

@hookimpl
def attention_backends():
    limits = tuple(Limit(fact, tuple(values), "says the third party") for fact, values in CASE["limits"].items())
    return [AttentionBackendSpec(name="third", load="{package}.backend:Third", rank=CASE["rank"], limits=limits,
                                 features=frozenset({{"sliding_window", "tree_mask"}}))]
"""
BACKEND = """
from fwk_attention.torch_sdpa.backend import TorchBackend
from . import CASE

class Third(TorchBackend):
    def __init__(self, context):
        super().__init__(context)
        assert CASE["is_possible"], "put where it cannot be"
"""
VALUES: dict[str, tuple[Any, ...]] = {
    "tp_size": (1, 2),
    "executors": ("inprocess", "threaded", "processes"),
    "quant": ("none", "int8"),
    "drafts": ("none", "chain"),
    "cache": ("none", "radix"),
}
NUMBERS = iter(range(1_000_000))


def start(folder: str, options: dict[str, Any]) -> fwk.LLM | FwkError:
    """The engine, or why there is none."""
    try:
        return fwk.LLM(
            folder, load_format="dummy", plugins=discover(), max_total_tokens=512, max_running_requests=4, **options
        )
    except FwkError as error:
        return error


def check(run: dict[str, Any], limits: dict[str, list[Any]], name: str, folder: Path, tmp: Path) -> bool:
    """Start on two ranks, serve if it starts, and hold both against what should be. Returns whether it started."""
    executor = "processes" if run["executors"] == "auto" else run["executors"]
    is_ours = all({**run, "tp_size": 2, "executors": executor}[fact] in values for fact, values in limits.items())
    is_possible = executor == "processes" and (is_ours or name == "auto")
    package = f"acme_third_{next(NUMBERS)}"
    site = tmp / package
    (site / package).mkdir(parents=True)
    (site / package / "case.json").write_text(json.dumps({"limits": limits, "rank": 50, "is_possible": is_ours}))
    (site / package / "__init__.py").write_text(DECLARES.format(package=package))
    (site / package / "backend.py").write_text(BACKEND)
    write_metadata(site, package, {"attention.third": package})
    options: dict[str, Any] = {
        "attention_backend": name,
        "tensor_parallel_size": 2,
        "executor": run["executors"],
        "quantization": run["quant"],
        "prefix_cache": run["cache"],
        **({"speculative_algorithm": "ngram"} if run["drafts"] == "chain" else {}),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", import_path(site))
        started = start(str(folder), options)
        if isinstance(started, FwkError):
            assert not is_possible, f"refused what could be served: {started}"
            assert "\n" not in str(started)
            assert re.search(r"cannot be used: it |no \w+ can serve this run: ", str(started))
            return False
        llm = started
        with llm:
            assert is_possible, f"accepted what nobody can serve: {llm.engine.info.chosen}"
            assert (llm.engine.info.chosen["attention"] == "third") == is_ours
            assert bool(llm.engine.info.reasons) == (not is_ours)
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
            assert [len(output.token_ids) for output in outputs] == [6, 6]
    return True


PLAIN = {"executors": "auto", "quant": "none", "drafts": "none", "cache": "radix"}


@pytest.mark.parametrize(
    ("run", "limits", "name", "starts"),
    [
        ({}, {"tp_size": [1]}, "third", False),
        ({}, {"executors": ["inprocess"]}, "third", False),
        ({"executors": "inprocess"}, {}, "auto", False),
        ({"executors": "threaded"}, {}, "third", False),
        pytest.param(
            {"quant": "int8", "drafts": "chain"},
            {"tp_size": [2], "quant": ["int8"]},
            "auto",
            True,
            marks=pytest.mark.sweep,  # two ranks are started, as in tests/e2e/test_tensor_parallel.py
        ),
    ],
)
def test_a_few(
    run: dict[str, Any], limits: dict[str, list[Any]], name: str, starts: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    assert check(PLAIN | run, limits, name, tiny_folder, tmp_path) == starts


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(
    run=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items() if name != "tp_size"}),
    limits=st.dictionaries(st.sampled_from(list(VALUES)), st.none(), max_size=2),
    name=st.sampled_from(["auto", "third"]),
    data=st.data(),
)
def test_many(
    run: dict[str, Any],
    limits: dict[str, Any],
    name: str,
    data: st.DataObject,
    tiny_folder: Path,
    tmp_path_factory: Any,
) -> None:
    bounds = {
        fact: data.draw(st.lists(st.sampled_from(VALUES[fact]), min_size=1, unique=True), label=fact) for fact in limits
    }
    run["executors"] = data.draw(st.sampled_from(["auto", "processes", "processes", run["executors"]]))
    event(f"started: {check(run, bounds, name, tiny_folder, tmp_path_factory.mktemp('site'))}")
