"""Fixtures for all tests, and which of them are the gate: ``python -m pytest``, against ``make sweep``."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec

# Kernels are built once, into the user's folder for caches; into the checkout's where home cannot be written to.
if "XDG_CACHE_HOME" not in os.environ and not os.access(os.path.expanduser("~"), os.W_OK):
    os.environ["XDG_CACHE_HOME"] = os.path.abspath("build/cache")
    os.environ["TRITON_CACHE_DIR"] = os.path.abspath("build/cache/triton")

# Small models gain nothing from threads, and threads that wait for each other crawl when the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Where it is set, each of the hundreds of processes that the tests start compiles all of its sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is first imported, whoever does.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

import fwk.plugins
from fwk_offline import llm
from tests.helpers.discovered import discover_once, share_adapters
from tests.helpers.durations import file_of, longest_first
from tests.helpers.interpreted import convert_arrays_of_one, patch_once_a_launch, remember_types, same_rows
from tests.helpers.selection import left_to_the_sweep, outside_of_parts
from tests.helpers.tiny import tiny_folder, tiny_llm  # after the settings above: torch reads them
from tests.helpers.zygote import fork_ranks

__all__ = ["same_rows", "tiny_folder", "tiny_llm"]

# The gate tries the same examples in every run, wherever it runs; the sweep others each time, from a seed it prints.
settings.register_profile(
    "gate", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "sweep", database=None, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)


SWEPT = {
    "test_works_in_a_fresh_process",  # one process for all plugins is in tests/core/test_testing_kit.py
    "test_the_time_is_linear_in_the_text",  # of one in tests/plugins/parsers/test_parsers.py
}
"""Tests of the kit's suites, which each of our plugins would repeat."""

ONE_OF_A_FAMILY = {"test_serves_a_tiny_model", "test_a_long_queue_costs_few_lookups"}
"""Those that the gate tries with one plugin of each family in a file: the rest of the engine is the same."""


def pytest_configure(config: pytest.Config) -> None:
    sys.dont_write_bytecode = False  # else each process of each run compiles all tests anew
    settings.load_profile("gate" if "not sweep" in config.option.markexpr else "sweep")
    discover_once(fwk.plugins, llm)
    share_adapters()
    fork_ranks()
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        patch_once_a_launch()
        convert_arrays_of_one()
        remember_types()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch computes on one thread: sums are added in one order, and the other cores are left to other tests."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_variables() -> Iterator[None]:
    """What a test, or a library within it, sets in the environment ends with it: later servers could not be forked."""
    before = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    yield
    for name in [name for name in os.environ if name not in before and name != "PYTEST_CURRENT_TEST"]:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def pytest_collection() -> None:
    gc.disable()  # what is imported and collected stays: to look through it again and again takes seconds


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[tuple[str, str, str]] = set()
    for item in items:
        name = getattr(item, "originalname", "")
        if name in SWEPT:
            item.add_marker(pytest.mark.sweep)
        elif name in ONE_OF_A_FAMILY and item.get_closest_marker("sweep") is None:
            key = file_of(item), getattr(getattr(item, "cls", None), "family", ""), name
            if key in seen:
                item.add_marker(pytest.mark.sweep)
            seen.add(key)
    for item in list(left_to_the_sweep(items)):
        item.add_marker(pytest.mark.sweep)
    longest_first(items, ("gate",) if "not sweep" in config.option.markexpr else ("gate", "sweep"))
    if out := outside_of_parts(items):
        config.hook.pytest_deselected(items=out)
        gone = set(out)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    """What lives until the end is not looked at again: else each engine's start collects garbage for 0.6 seconds."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or extensions report what they take for leaks


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With ``TESTS_UNTIL``, seconds since 1970, tests are left out from then on, and the summary tells how many."""
    if time.time() > float(os.environ.get("TESTS_UNTIL", "inf")):
        pytest.skip("LEFT OUT: the minutes for the suite were over before it began")
