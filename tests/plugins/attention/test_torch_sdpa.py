"""The parts of the torch backend that the contract does not see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fwk_attention.torch_sdpa.attend import MANY_KEYS, fused, fused_mask, products
from fwk_attention.torch_sdpa.plan import SPLIT_SAVES, split


@pytest.mark.parametrize("seed", range(20))
def test_split_keeps_everybody_and_bounds_the_padding(seed: int) -> None:
    random = np.random.default_rng(seed)
    seq_lens = random.integers(1, 4000, 64)
    places = np.flatnonzero(random.random(64) < 0.7)
    groups = split(places, seq_lens)
    assert sorted(np.concatenate(groups).tolist()) == places.tolist()
    for group in groups:
        assert group.tolist() == sorted(group.tolist())
        lens = np.sort(seq_lens[group])
        saved = [i * (lens[-1] - lens[i - 1]) for i in range(1, len(lens))]
        assert max(saved, default=0) < SPLIT_SAVES  # no further cut would be worth its launches


def test_equal_lengths_make_one_group_in_order() -> None:
    places = np.array([1, 2, 5])
    (group,) = split(places, np.full(6, 300))
    assert group is places
    assert split(places[:0], np.full(6, 300)) == []


@pytest.mark.parametrize("num_keys", [64, 512, 1000])
@pytest.mark.parametrize("num_queries", [1, 5, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_as_exact_as_the_fused_kernel(num_keys: int, num_queries: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q = (torch.randn(2, num_queries, 3, 2, 32) * 4).to(dtype)
    k, v = (torch.randn(2, 2, 3, num_keys, 32) * 2).to(dtype)
    hidden = torch.rand(2, num_queries, num_keys) < 0.4
    hidden[..., -1] = False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    with torch.inference_mode():
        one = products(q, k, v, mask, 0.2)
        two = fused(q, k, v, fused_mask(mask, 2), 0.2)
        exact = fused(q.double(), k.double(), v.double(), fused_mask(mask.double(), 2), 0.2)
        rounded = torch.matmul(q.transpose(1, 2).flatten(2, 3), k.transpose(2, 3)).mul_(0.2)
        rounded += fused_mask(mask, 2)
        plain = torch.matmul(torch.softmax(rounded, -1), v).view(2, 3, num_queries, 2, 32).transpose(1, 2)
    # Scores up to 40, as bfloat16 off by 0.1.
    error, error_fused, error_plain = ((x.double() - exact).square().mean().sqrt() for x in (one, two, plain))
    assert error <= (3 if num_keys >= MANY_KEYS else 1.5) * error_fused
    if dtype == torch.bfloat16:
        assert error <= 0.5 * error_plain
