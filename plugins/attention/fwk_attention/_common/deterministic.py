"""What no kernel here adds up in an order that depends on a token alone (``--enable-deterministic-inference``)."""

from __future__ import annotations

from collections.abc import Container

from fwk.interfaces.declaration import Facts

WHY_NOT = {
    "sliding_window": "reads a window's keys from the first that any token of a chunk sees, so that bits depend on the "
    "chunk",
    "tree_mask": "adds up the keys of a tree of drafts where they lie in the tree, so that bits depend on the other "
    "drafts: they hold for drafts in chains",
    "latent": "leaves the products of a latent layer's heads to torch, whose order of additions depends on the number "
    "of tokens",
}
"""By what a run needs of an attention backend."""


def why_not_deterministic(facts: Facts, holds: Container[str] = ()) -> str | None:
    """Why a backend that offers ``deterministic`` cannot hold it in such a run; None where it can, or need not.

    holds: of ``WHY_NOT``, those that are no reason for this backend.
    """
    if not facts.is_deterministic:
        return None
    why = next((why for feature, why in WHY_NOT.items() if feature in facts.features and feature not in holds), None)
    return None if why is None else f"{why} (--enable-deterministic-inference)"
