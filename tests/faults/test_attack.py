"""Random combinations of valid values at every route: none ends in a 5xx. ``make attack`` tries 8,000 of them."""

from __future__ import annotations

from tests.helpers.attack.__main__ import attack
from tests.helpers.rig import Server

MIN_SERVED = 0.85
"""Of the requests: what is refused tries little. ``make attack``, which has more of them, wants 0.8 of every route."""


async def test_no_valid_combination_is_an_error_of_ours(tiny: Server) -> None:
    result = await attack(tiny, 200, seed=16)
    assert not result.wrong, "\n".join(result.wrong)
    assert result.share_of(200) > MIN_SERVED, result.table()
