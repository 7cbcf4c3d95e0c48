"""Fixtures for all tests."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator

# Small models gain nothing from threads, and threads that wait for each other crawl when the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is first imported, whoever does.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from tests.helpers.interpreted import same_rows
from tests.helpers.tiny import tiny_folder, tiny_llm  # after the settings above: torch reads them

__all__ = ["same_rows", "tiny_folder", "tiny_llm"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, so that sums are added in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LONG = ("tests/e2e/", "tests/faults/", "tests/contracts/", "tests/core/test_pretended", "tests/core/test_gpu_script.py")
"""Files with few tests that take long: begun last, one would keep one process busy and leave the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; and every plugin in a process of its own takes minutes, so that is slow: one process for all is
    in tests/core/test_testing_kit.py."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in [*filter(is_fresh_process, items), *repeated_in_the_interpreter(items)]:
        item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With ``TESTS_UNTIL``, seconds since 1970, tests are left out from then on, and the summary tells how many."""
    if time.time() > float(os.environ.get("TESTS_UNTIL", "inf")):
        pytest.skip("LEFT OUT: the minutes for the suite were over before it began")


def is_fresh_process(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == "test_works_in_a_fresh_process"


def repeated_in_the_interpreter(items: list[pytest.Item]) -> list[pytest.Item]:
    """What the slow suite alone has of the attention contract of Triton's kernels: its interpreter takes a hundred
    times as long as they do. Steps are compared in float32; of every other property the first, the middle and the last
    parameters are tried.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.nodeid.startswith("tests/contracts/test_attention.py::TestTriton::"):
            tests[getattr(item, "originalname", "")].append(item)
    repeated: list[pytest.Item] = []
    for name, found in tests.items():
        if name == "test_equals_the_reference":
            repeated += [item for item in found if "float32" not in item.nodeid]
        else:
            repeated += [item for i, item in enumerate(found) if i not in (0, len(found) // 2, len(found) - 1)]
    return repeated
