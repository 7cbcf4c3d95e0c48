"""Fixtures for all tests."""

from __future__ import annotations

import os

# Small models gain nothing from threads, and threads that wait for each other crawl when the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is first imported, whoever does.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.helpers.tiny import tiny_folder, tiny_llm  # after the settings above: torch reads them

__all__ = ["tiny_folder", "tiny_llm"]
