"""Fixtures for all tests."""

from __future__ import annotations

import os

from tests.helpers.tiny import tiny_folder, tiny_llm

__all__ = ["tiny_folder", "tiny_llm"]

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
