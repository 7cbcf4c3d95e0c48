"""What the sampling tests share: texts behind rows, and a processor filled with one request's settings per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_native.thread_pool import ThreadPool

NUM_SLOTS = 64
FIRST_SLOT = 5  # so that a slot is never its row's number


@pytest.fixture
def make_context() -> Callable[..., SamplingContext]:
    def make(vocab_size: int, eos_token_ids: tuple[int, ...] = (0,)) -> SamplingContext:
        return SamplingContext(vocab_size, NUM_SLOTS, torch.device("cpu"), eos_token_ids, threads=ThreadPool())

    return make


@pytest.fixture
def make_view() -> Callable[..., LogitsView]:
    """Builds a view in which row i is the sequence of slot ``FIRST_SLOT + i``."""

    def make(texts: Sequence[Sequence[int]], num_prompt_tokens: Sequence[int] | None = None) -> LogitsView:
        slots = np.arange(FIRST_SLOT, FIRST_SLOT + len(texts))
        # What lies past a text's end is another sequence's rubbish: make it visible when it is read.
        token_ids = np.full((NUM_SLOTS, 64 + max(map(len, texts), default=0)), -7, np.int32)
        for slot, text in zip(slots, texts, strict=True):
            token_ids[slot, : len(text)] = text
        lengths = np.array([len(text) for text in texts])
        prompts = lengths if num_prompt_tokens is None else np.array(num_prompt_tokens)
        return LogitsView(slots, lengths, prompts, token_ids, slots.astype(np.uint64) * np.uint64(7_919))

    return make


@pytest.fixture
def apply(make_context: Any, make_view: Any) -> Callable[..., torch.Tensor]:
    """Edits a copy of ``logits`` by a processor of ``kind``, row i with the request fields of ``settings[i]``."""

    def run(
        kind: type[LogitsProcessor],
        logits: torch.Tensor,
        settings: Sequence[dict[str, Any]],
        texts: Sequence[Sequence[int]] | None = None,
        num_prompt_tokens: Sequence[int] | None = None,
        eos_token_ids: tuple[int, ...] = (0,),
    ) -> torch.Tensor:
        processor = kind(make_context(logits.shape[1], eos_token_ids))
        for row, fields in enumerate(settings):
            params = SamplingParams(**fields)
            params.check(logits.shape[1])
            processor.add(FIRST_SLOT + row, params)
        view = make_view(texts if texts is not None else [[1]] * len(logits), num_prompt_tokens)
        return processor.apply(logits.clone(), view)

    return run
