"""Trees of the most likely drafts, grown level by level (EAGLE-2, arXiv:2406.16858)."""

from __future__ import annotations

import torch
from torch import Tensor


class DraftTrees:
    """A tree for each of some rows, of one width.

    Of each level's candidates the ``width`` most likely ones are expanded; a candidate's probability is the product of
    the head's along its path, which stands for the chance that the target accepts it.
    """

    def __init__(self, width: int, logprobs: Tensor) -> None:
        """logprobs: [num_rows, vocab_size] of the token after each row's newest one."""
        self._width = width
        self.scores, self.tokens = logprobs.topk(width, dim=1)
        """Of all candidates: [num_rows, num_candidates]."""
        self.parents = torch.full_like(self.tokens, -1)
        self.frontier = torch.arange(width, device=logprobs.device).expand_as(self.tokens)
        """The candidates that are expanded next: [num_rows, width]."""

    def grow(self, logprobs: Tensor) -> None:
        """Add a level. logprobs: [num_rows, width, vocab_size] of what follows each of ``frontier``."""
        width, rows = self._width, self.tokens.shape[0]
        found, tokens = logprobs.topk(width, dim=2)
        scores = (found + self.scores.gather(1, self.frontier).unsqueeze(2)).reshape(rows, -1)
        first = self.tokens.shape[1]
        self.parents = torch.cat((self.parents, self.frontier.repeat_interleave(width, 1)), 1)
        self.tokens = torch.cat((self.tokens, tokens.reshape(rows, -1)), 1)
        self.scores = torch.cat((self.scores, scores), 1)
        self.frontier = scores.topk(width, dim=1).indices + first

    def best(self, most: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        """The likeliest ``most[i]`` candidates of each row, parents first: their tokens and parents."""
        # No child is likelier than its parent; of equals the earlier candidate, which a parent is, comes first.
        order = self.scores.sort(dim=1, descending=True, stable=True).indices.tolist()
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for row, all_tokens, above, count in zip(order, self.tokens.tolist(), self.parents.tolist(), most, strict=True):
            places = {-1: -1} | {candidate: place for place, candidate in enumerate(sorted(row[:count]))}
            kept = [candidate for candidate in places if candidate >= 0]
            tokens.append([all_tokens[candidate] for candidate in kept])
            parents.append([places[above[candidate]] for candidate in kept])
        return tokens, parents
