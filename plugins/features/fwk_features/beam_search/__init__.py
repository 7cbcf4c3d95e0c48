"""Beam search: the likeliest texts instead of sampled ones, each step a request of one token over cached prefixes.

A dialect asks for it with ``extras={"beam_search": ...}`` of a ``GenerateInput``: the fields of ``Beams`` by name.
"""

from __future__ import annotations

from fwk import FeatureSpec, hookimpl


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="beam_search",
            server="fwk_features.beam_search.server:BeamSearchServer",
            methods=("beam_search",),
            exclusive=("beam_search",),
            changes_kv=False,
            summary="beam search (use_beam_search, fwk.LLM.beam_search)",
        )
    ]
