"""Trees of the most likely drafts, grown level by level (EAGLE-2, arXiv:2406.16858)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.speculative import Drafts

if TYPE_CHECKING:
    from fwk.interfaces.device import Upload


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

    def drafts(self, rows: np.ndarray, most: np.ndarray, send: Upload) -> Drafts:
        """The likeliest ``most[i]`` candidates of each row, parents first.

        rows: [num_rows] int64, where these stand among all [num_seqs] of ``most``; the others have no drafts.
        """
        count, mine = self.tokens.shape[1], np.minimum(most[rows], self.tokens.shape[1])
        width = int(mine.max())
        # No child is likelier than its parent; of equals the earlier candidate, which a parent is, comes first.
        kept = self.scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
        if (mine < width).any():  # those that are too many come last
            is_kept = send(np.arange(width) < mine[:, None])
            kept = torch.where(is_kept, kept, count)
        kept = kept.sort(dim=1).values
        chosen = kept.clamp(max=count - 1)
        tokens, above = self.tokens.gather(1, chosen), self.parents.gather(1, chosen)
        parents = torch.where(above < 0, -1, torch.searchsorted(kept, above.contiguous()))
        counts = np.zeros(len(most), np.int64)
        counts[rows] = mine
        if len(rows) < len(most):
            index = send(rows)
            tokens = tokens.new_zeros((len(most), width)).index_copy_(0, index, tokens)
            parents = parents.new_full((len(most), width), -1).index_copy_(0, index, parents)
        return Drafts(tokens, parents, counts=counts)
