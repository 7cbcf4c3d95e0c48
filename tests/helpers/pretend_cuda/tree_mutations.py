"""What is done wrongly to trees of drafts in flight, to see that tests notice."""

from __future__ import annotations

import pytest
from torch import Tensor

from fwk.worker import in_flight
from fwk.worker.draft_tree import accepted_in_trees
from fwk.worker.drafting import Drafting


def keys_stay_where_they_were(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drafting, "_keep_early", lambda *_: None)


def a_path_ends_a_node_early(patch: pytest.MonkeyPatch) -> None:
    def accepted(*parts: Tensor) -> tuple[Tensor, Tensor]:
        order, count = accepted_in_trees(*parts)
        return order, (count - 1).clamp(min=0)

    patch.setattr(in_flight, "accepted_in_trees", accepted)
