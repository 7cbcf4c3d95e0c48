"""A prefix cache that fails, however and whenever: requests get the tokens they would have got, without it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.engine_machine import assert_idle, request, run

from fwk.errors import EngineDead
from fwk.interfaces.prefix_cache import PrefixMatch
from fwk_cache._common.radix import RadixPrefixCache
from fwk_kit.testing.fake_engine import VOCAB, make_engine, reference

NUM_BLOCKS, BLOCK_SIZE = 40, 4


def _raise(answer: Any) -> Any:
    raise ZeroDivisionError("no luck")


def _exit(answer: Any) -> Any:
    raise SystemExit(3)


ANY: dict[str, Callable[[Any], Any]] = {"raises": _raise, "exits": _exit, "None": lambda answer: None}
IDS = {
    "another's": lambda ids: [*ids[:-1], 10**6],
    "twice": lambda ids: [*ids[:-1], *ids[:1]] if len(ids) > 1 else [*ids, *ids],
    "too many": lambda ids: [*ids, 0],
    "too few": lambda ids: ids[:-1],
    "negative": lambda ids: [-1 for _ in ids],
}
WRONG: dict[str, dict[str, Callable[[Any], Any]]] = {
    "match": {
        "not its own": lambda match: PrefixMatch(match.node, [10**6], BLOCK_SIZE),
        "longer than its blocks": lambda match: PrefixMatch(match.node, match.block_ids, match.num_tokens + 1),
        "past the prompt": lambda match: PrefixMatch(match.node, match.block_ids * 40, match.num_tokens * 40),
    },
    "lock": {},
    "unlock": {},
    "insert": {"too few": lambda made: (made[0], made[1][:-1]), "no pair": lambda made: made[1]},
    "evict": IDS,
    "num_evictable_blocks": {
        "negative": lambda count: -1,
        "too many": lambda count: NUM_BLOCKS + 1,
        "none": lambda count: 0,
        "too few": lambda count: max(count - 1, 0),
    },
    "num_blocks": {"one more": lambda count: count + 1},
}
CASES = [
    pytest.param(method, kind, id=f"{method}-{kind}")
    for method, kinds in WRONG.items()
    for kind in (*(ANY if method not in ("lock", "unlock") else ("raises", "exits")), *kinds)
]


@pytest.mark.gate(10)
@pytest.mark.parametrize("groups", [{}, {"num_window_groups": 2, "window": 7}], ids=["", "windows"])
@pytest.mark.parametrize(("method", "kind"), CASES)
def test_requests_continue_without_it(
    method: str, kind: str, groups: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RadixPrefixCache.__dict__[method]
    right, spoil, calls = getattr(own, "fget", own), (ANY | WRONG[method])[kind], 0
    rng = random.Random(f"{method} {kind}")
    shared = [rng.randrange(VOCAB) for _ in range(21)]
    asked = [[*shared[: rng.choice([0, 9, 21])], *(rng.randrange(VOCAB) for _ in range(9))] for _ in range(8)]
    failed_at = set[int]()
    for fails_at in (1, 5, 31):
        calls = 0

        def wrong(cache: Any, *args: Any, fails_at: int = fails_at, **kw: Any) -> Any:
            nonlocal calls
            calls += 1
            answer = right(cache, *args, **kw)
            if calls < fails_at or answer == []:
                return answer
            failed_at.add(fails_at)
            return spoil(answer)

        monkeypatch.setattr(RadixPrefixCache, method, property(wrong) if isinstance(own, property) else wrong)
        engine = make_engine(
            num_blocks=NUM_BLOCKS + 15 * len(groups), block_size=BLOCK_SIZE, cache="radix", depth=2, is_late=True,
            keeps_cache=False, check_blocks=method != "num_blocks", **groups,
        )  # fmt: skip
        for i, prompt in enumerate(asked):
            assert engine.add(request(f"{i}", prompt, max_tokens=5 + 3 * i)) == []
        outputs = run(engine)
        assert [outputs[f"{i}", 0] for i in range(8)] == [reference(p, 5 + 3 * i) for i, p in enumerate(asked)]
        assert_idle(engine)
        longest = NUM_BLOCKS * BLOCK_SIZE // 2
        engine.add(request("again", asked[0][:9], max_tokens=longest))  # all blocks can be had again
        assert run(engine)["again", 0] == reference(asked[0][:9], longest)
        assert_idle(engine)
        troubles = engine.stats().troubles
        if fails_at in failed_at:
            (why,) = troubles
            assert why.startswith("prefix cache 'radix' (fwk ")
            assert why.endswith(f" in {method}; prompts are computed in full") or "which cannot be" in why
        else:
            assert troubles == ()
    assert failed_at, "it was asked"


def test_the_end_of_the_workers_is_not_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(cache: Any, *args: Any) -> Any:
        raise EngineDead("a worker is gone")

    monkeypatch.setattr(RadixPrefixCache, "insert", gone)
    engine = make_engine(cache="radix", keeps_cache=False)
    engine.add(request("one", list(range(20))))
    with pytest.raises(EngineDead, match="a worker is gone"):
        run(engine)
