"""Fixtures for all tests."""

from __future__ import annotations

import os

# Small models gain nothing from threads, and threads that wait for each other crawl when the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.helpers.tiny import tiny_folder, tiny_llm  # noqa: E402 - the settings above come before torch

__all__ = ["tiny_folder", "tiny_llm"]
