"""Which drafts stand."""

from __future__ import annotations


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
