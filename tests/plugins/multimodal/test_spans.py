"""Media whose tokens see each other: no step ends within a piece, whatever the policy says of chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fwk.engine.chunking import Chunking
from fwk.interfaces.feature import EnginePartContext
from fwk.interfaces.multimodal import Media
from fwk.types import Request, SamplingParams
from fwk_multimodal.media.engine import MediaPrompts


def part(*, is_host: bool, is_span: bool = True) -> MediaPrompts:
    """Of one request, with pieces at 10 to 14 and 16 to 20 of a prompt of 30."""
    made = MediaPrompts(EnginePartContext("media", lambda operation, *args: [""], is_host=is_host))
    made._media["r"] = [Media(bytes([start]), "image", start, 4, "", 0, is_span) for start in (10, 16)]
    return made


def sequence(*parts: Any) -> Any:
    request = Request(request_id="r", prompt_token_ids=list(range(30)), sampling=SamplingParams())
    return SimpleNamespace(request=request, token_ids=list(range(30)), parts=parts)


@pytest.mark.parametrize(
    ("is_host", "start", "count", "wanted"),
    [
        (True, 0, 10, 10), (True, 0, 13, 10), (True, 0, 14, 14), (True, 0, 30, 16), (True, 14, 3, 2), (True, 20, 5, 5),
        (True, 10, 3, 0), (True, 12, 1, 0), (True, 12, 2, 2), (True, 16, 14, 14),
        (False, 0, 30, 30), (False, 0, 18, 16), (False, 0, 20, 20), (False, 0, 12, 10), (False, 11, 2, 0),
    ],
)  # fmt: skip
def test_a_step_ends_around_a_piece(is_host: bool, start: int, count: int, wanted: int) -> None:
    """One that begins within a piece, behind a cached prefix, goes on to its end; on a CPU it has one piece at most."""
    assert part(is_host=is_host).limit(sequence(), start, count) == wanted


def test_others_are_cut_anywhere_and_come_back_from_tiers() -> None:
    other = part(is_host=False, is_span=False)
    assert other.limit(sequence(), 0, 12) == 12
    assert other.restorable(sequence())
    assert not part(is_host=True).restorable(sequence())


def chunking(max_chunk: int | None, policy: int, max_step: int = 100) -> Chunking:
    limits: Any = SimpleNamespace(
        whole_prompts=False, max_chunk_tokens=max_chunk, max_step_tokens=max_step, max_decode_gap=None
    )
    kv_blocks: Any = SimpleNamespace(cut_chunk=lambda sequence, start, count: count)
    queue: Any = SimpleNamespace(policy=SimpleNamespace(chunk=lambda sequence, remaining, room: min(policy, room)))
    return Chunking(limits, kv_blocks, queue)


def test_a_policy_that_says_less_than_a_piece_does_not_hold_it_up() -> None:
    whole = sequence(part(is_host=False))
    assert chunking(50, 2).size(whole, 20, 50) == 20, (
        "from place 10 on: two tokens would cut a piece, the room does not"
    )
    assert chunking(50, 2).size(whole, 30, 50) == 2
    assert chunking(50, 2).size(whole, 20, 3) == 0, "it waits for a step with more room"


def test_a_prompt_that_is_cut_at_the_size_of_a_step_is_cut_around_pieces() -> None:
    whole = sequence(part(is_host=False))
    assert chunking(None, 99).size(whole, 30, 100) == 30
    assert chunking(None, 99, max_step=18).size(whole, 30, 18) == 16
