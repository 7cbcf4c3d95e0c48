"""Which drafts are accepted: exact matches of a chain, rejection sampling of drafts that were drawn, and thresholds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.speculative import Acceptance

EXACT = Acceptance()


def accepted(drafts: list[int], picked: list[int]) -> list[int]:
    """The tokens a sequence gains from a verified chain of drafts.

    ``picked[i]`` was sampled from the target's distribution after ``drafts[:i]``. Drafts are kept as long as they are
    what the target picked anyway, and the first pick that differs replaces its draft. Each token is thus drawn from
    the target's own distribution, which is what loss-free speculative sampling (Leviathan et al. 2023, Algorithm 1)
    comes to for drafts that were certain: a draft x is kept with probability p(x), and a rejected place is drawn from
    p without x. As a pick depends on seed and position alone, the output is even token for token the one without
    speculation.
    """
    kept = 0
    while kept < len(drafts) and drafts[kept] == picked[kept]:
        kept += 1
    return picked[: kept + 1]


def count_gained(drafts: np.ndarray, picked: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many tokens ``accepted`` returns for each of many chains: [num_chains] int64.

    counts [num_chains] int64: drafts of each chain, at least one; drafts, picked: [sum of counts], what each draft is,
    and what was picked in its place.
    """
    starts = np.cumsum(counts) - counts
    nth = np.arange(len(drafts)) - np.repeat(starts, counts)
    first_wrong = np.where(drafts != picked, nth, np.repeat(counts, counts))
    return np.minimum.reduceat(first_wrong, starts) + 1


def rejection_logits(
    logits: Tensor, drafts: Tensor, proposal: Tensor, draws: Tensor, acceptance: Acceptance = EXACT
) -> Tensor:
    """Logits whose pick settles a drawn draft: the draft alone if it is kept, else what is left of the target.

    Loss-free speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023): a draft x drawn from q is
    kept with probability min(1, p(x) / q(x)); a rejected place is drawn from max(p - q, 0), normalised.

    logits: [n, vocab_size] float32 of the target, processed; drafts: [n] int64; proposal: [n, vocab_size], q;
    draws: [n] float64 in [0, 1), independent of the draft and of the sampler's own. Returns [n, vocab_size].
    acceptance: keeps more, and leaves the target's distribution.
    """
    p = torch.softmax(logits.double(), dim=-1)
    q = proposal.double()
    column = drafts.unsqueeze(1)
    of_drafts = p.gather(1, column)
    is_kept = draws.unsqueeze(1) * acceptance.scale * q.gather(1, column) < of_drafts
    if acceptance.single < 1.0:
        is_kept |= of_drafts >= acceptance.single
    rest = (p - q).clamp_(min=0)
    rest.masked_fill_(is_kept, 0).scatter_add_(1, column, is_kept.double())
    return rest.log_().float()


def replaces_picks(logits: Tensor, drafts: Tensor, draws: Tensor, acceptance: Acceptance) -> Tensor:
    """Which certain drafts are kept where the target's own pick is another token: [n] bool.

    A draft of probability p is to be kept with min(1, p / scale), or always; the pick is it with probability p at
    least, and more often where both were drawn with the same numbers. So of the other picks this share is replaced,
    and no draft is lost that exact sampling keeps.

    logits, drafts, draws: as in ``rejection_logits``.
    """
    p = torch.softmax(logits.double(), dim=-1).gather(1, drafts.unsqueeze(1)).squeeze(1)
    wanted = (p / acceptance.scale).clamp_(max=1.0)
    if acceptance.single < 1.0:
        wanted.masked_fill_(p >= acceptance.single, 1.0)
    return draws * (1.0 - p) < wanted - p


def uniform_draws(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each seed and place: [n] uint64 and int64 to [n] float64 (SplitMix64's mixing).

    The sampler's numbers for the same seed and place are others: the state is offset by a constant.
    """
    with np.errstate(over="ignore"):
        x = seeds + np.uint64(0xA0761D6478BD642F) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
