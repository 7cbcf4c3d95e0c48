"""Fixtures for all tests."""

from __future__ import annotations

import os

# Small models gain nothing from threads, and threads that wait for each other crawl when the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is first imported, whoever does.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tests.helpers.tiny import tiny_folder, tiny_llm  # after the settings above: torch reads them

__all__ = ["tiny_folder", "tiny_llm"]


LONG = ("tests/e2e/", "tests/faults/", "tests/contracts/")
"""Files with few tests that take long: begun last, one would keep one process busy and leave the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; and every plugin in a process of its own takes minutes, so that is slow: one process for all is
    in tests/core/test_testing_kit.py."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        if getattr(item, "originalname", "") == "test_works_in_a_fresh_process":
            item.add_marker(pytest.mark.slow)
