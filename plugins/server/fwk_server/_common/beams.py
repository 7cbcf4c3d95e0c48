"""Requests that search with beams instead of sampling: what they may say as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import GenerateInput
from fwk_server._common.best_of import best_of
from fwk_server._common.chat.models import GenerateRequest
from fwk_server._common.hidden import check_hidden

FEATURE = "beam_search"
"""The feature that searches, by its key in ``GenerateInput.extras``."""

# Of each field that means nothing without sampling: what asks for nothing.
_NO_MEANING: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "stop": ("", []),
    "stop_regex": ("", []),
    "repetition_detection": (),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
}


def with_beams(item: GenerateInput, body: GenerateRequest) -> GenerateInput:
    """``item``, searched with beams if the request says so. Raises ``InvalidRequest`` for what beams cannot do."""
    if not body.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(body, name) not in (None, False, 1, 1.0):
                raise InvalidRequest(f"{name} belongs to beam search: it needs use_beam_search", name)
        if body.best_of in (None, item.n):
            return item
        check_hidden(body.return_hidden_states, best_of=body.best_of)
        return best_of(item, body.best_of)
    for name, neutral in _NO_MEANING.items():
        if getattr(body, name) not in (None, *neutral):
            raise InvalidRequest(f"{name} cannot be had with use_beam_search: beams are not sampled", name)
    if item.sampling.extra:
        name = next(iter(item.sampling.extra))
        raise InvalidRequest(f"{name} cannot be had with use_beam_search: beams are not sampled", name)
    if item.sampling.grammar is not None:
        raise InvalidRequest("use_beam_search cannot be had with a grammar or tools", "use_beam_search")
    if body.temperature not in (None, 0, 1):
        raise InvalidRequest("temperature must be 0 with use_beam_search: beams are not sampled", "temperature")
    width = body.best_of or item.n
    early = body.early_stopping if body.early_stopping is not None else False
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    beams = {"num_beams": width, "length_penalty": penalty, "early_stopping": early}
    return replace(item, extras={**item.extras, FEATURE: beams})
