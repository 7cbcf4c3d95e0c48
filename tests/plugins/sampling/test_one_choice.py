"""Where settings have room for one token, every sampler picks the first of the most likely, whatever it draws."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import fwk_native as native
from fwk.interfaces.sampling import LogitsView, Sampler, SamplingContext, SamplingRows
from fwk.types import SamplingParams
from fwk_native.thread_pool import ThreadPool
from fwk_sampling.processors.temperature import Temperature
from fwk_sampling.processors.truncation import LimitArrays, Truncation, truncate_batch
from fwk_sampling.torch_sampler.sampler import TorchSampler, sample_batch

COUNT = 24

ONE = [
    {"top_k": 1},
    {"top_k": 1, "temperature": 5.0, "top_p": 0.99},
    {"top_p": 1e-30},
    {"top_p": 1e-9},
    {"top_p": 1e-5, "temperature": 3.0},
    {"top_k": 40, "top_p": 0.01},
    {"min_p": 1.0},
    {"min_p": 1.0, "top_k": 50, "temperature": 2.0},
    {"temperature": 1e-6},
    {"temperature": 1e-30, "top_p": 0.9},
]
SEVERAL = [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}]
"""Settings that leave more than one of the equals."""


def limits_of(some: SamplingParams, vocab_size: int) -> LimitArrays:
    min_logit = np.log(some.min_p) if some.min_p else -np.inf
    top_k = some.top_k if some.top_k < vocab_size else 0
    return LimitArrays(*(np.full(COUNT, x) for x in (top_k, float(some.top_p), min_logit)))


def by_torch(logits: Tensor, some: SamplingParams, rows: SamplingRows, *, is_device: bool) -> Tensor:
    context = SamplingContext(logits.shape[1], COUNT, torch.device("cpu"), ())
    view = LogitsView(np.arange(COUNT), rows.positions, rows.positions, np.zeros((COUNT, 1), np.int32))
    logits = logits.float().clone()
    for kind in (Temperature,) if is_device else (Temperature, Truncation):
        processor = kind(context)
        if any([processor.add(slot, some) for slot in range(COUNT)]):
            logits = processor.apply(logits, view)
    if not is_device:
        return TorchSampler(context).sample(logits, rows)
    return sample_batch(truncate_batch(logits, np.arange(COUNT), limits_of(some, logits.shape[1])), rows)


def by_itself(kind: type[Sampler]) -> Callable[[Tensor, SamplingParams, SamplingRows], Tensor]:
    def pick(logits: Tensor, some: SamplingParams, rows: SamplingRows) -> Tensor:
        threads = ThreadPool(1)
        sampler = kind(SamplingContext(logits.shape[1], COUNT, torch.device("cpu"), (), threads=threads))
        for slot in range(COUNT):
            sampler.add(slot, some)
        return sampler.sample(logits, rows)

    return pick


def samplers() -> dict[str, Callable[[Tensor, SamplingParams, SamplingRows], Tensor]]:
    found = {
        "torch": lambda *given: by_torch(*given, is_device=False),
        "torch on a device": lambda *given: by_torch(*given, is_device=True),
    }
    if native.refusal() is None:
        from fwk_sampling.cpu_sampler.sampler import CpuSampler

        found["cpu"] = by_itself(CpuSampler)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from fwk_sampling.triton_sampler.sampler import TritonSampler

        found["triton"] = by_itself(TritonSampler)
    return found


def rows_of(count: int) -> SamplingRows:
    places = np.arange(count)
    return SamplingRows(np.zeros(count, bool), places.astype(np.uint64), places, False, places)


@pytest.mark.gate(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_choice_is_the_first_of_equals(dtype: torch.dtype) -> None:
    for vocab_size in (9, 6000):
        row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1))
        equals = [3, 5, vocab_size - 1]
        row[equals] = 8.0
        logits = row.to(dtype).expand(COUNT, -1).contiguous()
        for name, pick in samplers().items():
            count = 3 if name == "triton" else COUNT  # whose interpreter takes its time
            if count < COUNT < vocab_size:
                continue
            for asked in ONE:
                found = set(pick(logits[:count], SamplingParams(**asked), rows_of(count)).tolist())
                assert found == {3}, f"{name}, {asked}, {vocab_size} tokens: {found}"
            for asked in SEVERAL if count == COUNT else ():
                found = set(pick(logits, SamplingParams(**asked), rows_of(count)).tolist())
                assert found >= set(equals), f"{name}, {asked}, {vocab_size} tokens: {found}"
