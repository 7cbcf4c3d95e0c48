"""What of a proposal comes after a step in flight, whose drafts are verified first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fwk.interfaces.speculative import Drafts


@dataclass(frozen=True, slots=True)
class ComingDrafts:
    """Those of a sequence that a step in flight verifies; parents: as ``DraftTree`` has them, None for a chain."""

    token_ids: list[int]
    parents: list[int] | None

    @property
    def num_levels(self) -> int:
        """Drafts along the longest path."""
        if self.parents is None:
            return len(self.token_ids)
        levels: list[int] = []
        for parent in self.parents[: len(self.token_ids)]:
            levels.append(1 + (levels[parent] if parent >= 0 else 0))
        return max(levels, default=0)


def leave_after(drafts: Drafts, coming: list[ComingDrafts | None]) -> None:
    """Leave of proposals what comes after a step in flight. coming: what it verifies of each sequence, if it has it."""
    assert isinstance(drafts.token_ids, list), "a decoder that drafts ahead does so on the host"
    assert not isinstance(drafts.parents, Tensor)
    for i, verified in enumerate(coming):
        tokens, parents = drafts.token_ids[i], None if drafts.parents is None else drafts.parents[i]
        if verified is None:
            continue
        if parents is None and verified.parents is None:
            drafts.token_ids[i] = _after(tokens, verified.token_ids)
            continue
        above = range(-1, len(tokens) - 1) if parents is None else parents
        drafts.token_ids[i], left = _after_path(tokens, above, verified)
        if drafts.parents is not None:
            drafts.parents[i] = left


def _after(tokens: list[int], verified: list[int]) -> list[int]:
    """The part of a continuation that follows a step in flight, if the continuation is right.

    Of the drafts that the step verifies those are then accepted which agree with it, and one token comes after them.
    """
    same = 0
    while same < min(len(tokens), len(verified)) and tokens[same] == verified[same]:
        same += 1
    return tokens[same + 1 :]


def _after_path(tokens: list[int], parents: Sequence[int], verified: ComingDrafts) -> tuple[list[int], list[int]]:
    """``_after`` of a tree, or of what follows one: tokens and parents of what then comes after.

    The continuation follows each node's first child; its other branches are dropped.
    """
    first: dict[int, int] = {}
    for node, parent in enumerate(parents):
        first.setdefault(parent, node)
    above = range(-1, len(verified.token_ids) - 1) if verified.parents is None else verified.parents
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(above, verified.token_ids, strict=False)):
        children.setdefault((parent, token), node)
    at, reached = first.get(-1), -1
    while at is not None and (reached := children.get((reached, tokens[at]), -1)) >= 0:
        at = first.get(at)
    if at is None:
        return [], []
    places, left = {at: -1}, list[int]()
    kept: list[int] = []
    for node in range(at + 1, len(tokens)):
        if parents[node] in places:
            places[node] = len(left)
            left.append(tokens[node])
            kept.append(places[parents[node]])
    return left, kept
