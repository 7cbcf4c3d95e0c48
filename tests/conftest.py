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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every plugin in a process of its own takes minutes; one process for all: tests/core/test_testing_kit.py."""
    for item in items:
        if getattr(item, "originalname", "") == "test_works_in_a_fresh_process":
            item.add_marker(pytest.mark.slow)
