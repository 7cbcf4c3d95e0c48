"""Drafts in a worker's steps: when a decoder is asked, where drafts are kept, and which are accepted.

How they are made is another plugin's.
"""

from __future__ import annotations

from fwk import FeatureSpec, hookimpl


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="drafting",
            worker="fwk_speculative.drafting.worker:DraftingPart",
            changes_kv=False,
            summary="verifies what speculative decoders and features draft, several tokens in one step",
        )
    ]
