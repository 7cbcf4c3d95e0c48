"""What a normaliser makes of a text stays in proportion to it, whatever the tokenizer.json says."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from fwk_errors import InvalidRequest
from fwk_tokenizer.bounds import growth_of_all, steps

FREE_GROWTH = 4
"""Times as many characters as the text any normaliser may make of it."""

MAX_FREE_CHARACTERS = 2**20
"""Of a normalised text that costs too little to look at."""

SAMPLE = 2**16
"""Characters of a text that are normalised first: where these grow, the rest is not tried."""


class GrowthLimit:
    """Normalises a long text step by step, before a tokenizer does, where its normaliser might make far more of it.

    Nearly all normalisers cannot, which ``growth_of_all`` tells from their steps: then nothing is done here.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        part = tokenizer.normalizer
        self._normaliser: Any = None if part is None else json.loads(part.__getstate__())
        self._growth = growth_of_all(self._normaliser)

    def check(self, text: str) -> None:
        """Raises ``InvalidRequest`` for a text of which too much would become."""
        if self._growth <= FREE_GROWTH or len(text) * self._growth <= MAX_FREE_CHARACTERS:
            return
        most = max(FREE_GROWTH * len(text), MAX_FREE_CHARACTERS)
        for part in (text[:SAMPLE], text) if len(text) > SAMPLE else (text,):
            for step in self._steps:
                part = step.normalize_str(part)
                if len(part) > most:
                    raise InvalidRequest(
                        f"the model's tokenizer makes more than {most} characters of this text of {len(text)}", "prompt"
                    )

    @cached_property
    def _steps(self) -> list[Any]:
        empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        each = [step for step in steps(self._normaliser) if step["type"] != "Sequence"]
        return [Tokenizer.from_str(json.dumps(empty | {"normalizer": step})).normalizer for step in each]
