"""SGLang's scores: how likely each of some tokens is to come next, behind a query and each of several items.

A generating model answers them. Each item is a prompt of its own, and the query before it is computed once, for the
prefix cache shares it: no delimiter between items is needed, nor a mask that keeps them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput
from fwk.types import SamplingParams
from fwk.types.sampling import check_token_ids
from fwk_server._common.body import want
from fwk_server._common.caller import Caller
from fwk_server._common.chat.models import MAX_INPUTS
from fwk_server._common.chat.outputs import Usage, run
from fwk_server._common.chat.sampling import checked
from fwk_server._common.inputs import read_prompts
from fwk_server.scoring.bodies import ScoreRequest

MAX_LABELS = 1_024
MAX_SCORES = 4_096
"""Items times labels of a request: each is a sequence of the engine's."""


def label_inputs(call: ScoreRequest, frontend: Frontend, caller: Caller) -> list[GenerateInput]:
    """For each item one input for each label, whose only token is that label. Raises ``InvalidRequest``."""
    frontend.card.check_task("generate")
    labels = want(call.label_token_ids, list, "an array of token ids", "label_token_ids")
    if not labels or not all(type(label) is int for label in labels):
        raise InvalidRequest("label_token_ids must hold token ids", "label_token_ids")
    check_token_ids(labels, frontend.card.vocab_size, "label_token_ids", MAX_LABELS)
    prompts = _prompts(call, frontend)
    if len(prompts) * len(labels) > MAX_SCORES:
        raise InvalidRequest(
            f"{len(prompts)} items with {len(labels)} labels make more than {MAX_SCORES} scores", "items"
        )
    urgency, service = call.urgency(caller), call.service(caller)
    items: list[GenerateInput] = []
    for i, token_ids in enumerate(prompts):
        for label in labels:
            sampling = SamplingParams(
                max_tokens=1, temperature=0.0, logprobs=0, allowed_token_ids=[label], ignore_eos=True
            )
            item = GenerateInput(
                token_ids, sampling, priority=urgency, service=service, label=caller.label, trace=caller.trace
            )
            items.append(checked(frontend, item, {"prompt": f"query and items[{i}]"}))
    return items


def _prompts(call: ScoreRequest, frontend: Frontend) -> list[list[int]]:
    """Query and item together, in the order that is asked for: texts are joined before they are tokenised."""
    given: list[Any] = call.items if isinstance(call.items, list) else [call.items]
    if isinstance(call.query, str):
        if not 0 < len(given) <= MAX_INPUTS or not all(isinstance(item, str) for item in given):
            raise InvalidRequest(f"with a text as query, items must be a text or 1 to {MAX_INPUTS} texts", "items")
        texts = [item + call.query if call.item_first else call.query + item for item in given]
        return [prompt.token_ids for prompt in read_prompts(texts, True, frontend, "items", MAX_INPUTS)]
    query = read_prompts(call.query, True, frontend, "query", 1)[0].token_ids
    if not 0 < len(given) <= MAX_INPUTS or not all(isinstance(item, list) for item in given):
        raise InvalidRequest(f"with token ids as query, items must be 1 to {MAX_INPUTS} arrays of token ids", "items")
    items = [prompt.token_ids for prompt in read_prompts(given, True, frontend, "items", MAX_INPUTS)]
    return [item + query if call.item_first else query + item for item in items]


async def label_scores(
    frontend: Frontend, items: Sequence[GenerateInput], num_labels: int, is_softmax: bool
) -> list[list[float]]:
    """For each item the labels' probabilities: among all tokens, or among the labels."""
    logprobs = [-math.inf] * len(items)
    async with aclosing(run(frontend, items, Usage(items))) as steps:
        async for place, deltas in steps:
            for delta in deltas:
                for entry in delta.logprobs or ():
                    logprobs[place] = entry.logprob
    rows = [logprobs[i : i + num_labels] for i in range(0, len(items), num_labels)]
    return [_shares(row) if is_softmax else [math.exp(value) for value in row] for row in rows]


def _shares(row: Sequence[float]) -> list[float]:
    most = max(row)
    if most == -math.inf:
        return [1.0 / len(row)] * len(row)
    parts = [math.exp(value - most) for value in row]
    return [part / sum(parts) for part in parts]
