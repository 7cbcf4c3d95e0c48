"""Requests that search with beams instead of sampling: each step continues the best texts, over cached prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from fwk.errors import InvalidRequest, RequestFailed
from fwk.interfaces.dialect import Frontend, GenerateInput, OutputDelta
from fwk.types import TokenLogprobs
from fwk.types.beam_search import Beam, BeamSearch, EarlyStopping
from fwk_server._common.best_of import best_of, plain
from fwk_server._common.chat.models import GenerateRequest
from fwk_server._common.hidden import check_hidden

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class BeamInput(GenerateInput):
    """One prompt whose ``n`` best texts are searched for, ``width`` at a time."""

    width: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def search(self, frontend: Frontend) -> BeamSearch:
        """Raises ``InvalidRequest`` for more beams than can be scored."""
        sampling = self.sampling
        ends = () if sampling.ignore_eos else frontend.card.end_token_ids
        ends = tuple(dict.fromkeys([*ends, *sampling.stop_token_ids]))
        most = sampling.max_tokens or frontend.card.max_model_len - len(self.prompt_token_ids)
        return BeamSearch(self.width, ends, most, self.length_penalty, self.early_stopping)


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


def with_beams(item: GenerateInput, body: GenerateRequest, frontend: Frontend) -> GenerateInput:
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
    made = BeamInput(**plain(item), width=width, length_penalty=penalty, early_stopping=early)
    made.search(frontend)
    return made


async def searched(frontend: Frontend, item: BeamInput) -> AsyncGenerator[list[OutputDelta], None]:
    """The whole texts, best first, when the search is over. Closing it ends the search."""
    search = item.search(frontend)
    wanted = item.sampling.logprobs
    sampling = msgspec.structs.replace(
        item.sampling, max_tokens=1, temperature=0.0, ignore_eos=True, stop_token_ids=[], logprobs=search.num_candidates
    )
    cached = 0
    while not search.is_done:
        steps = [
            replace(item, prompt_token_ids=[*item.prompt_token_ids, *beam.token_ids], sampling=sampling, n=1)
            for beam in search.running
        ]
        scores = await _all(_scored(frontend, step) for step in steps)
        cached = cached or min(scores[0][1], len(item.prompt_token_ids))
        search.update([score for score, _ in scores])
    yield [_delta(index, beam, item, wanted, cached, frontend) for index, beam in enumerate(search.best(item.n))]


async def _all(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """What all of them return; the first error ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _scored(frontend: Frontend, item: GenerateInput) -> tuple[TokenLogprobs, int]:
    """The scores of the next token, and how much of the text was cached."""
    async with aclosing(frontend.generate(item)) as steps:
        async for deltas in steps:
            for delta in deltas:
                if delta.finish_reason in ("error", "abort"):
                    raise delta.failure()
                if delta.logprobs:
                    return delta.logprobs[0], delta.cached_tokens
    raise RequestFailed("the engine ended the request before it was finished")


def _delta(index: int, beam: Beam, item: BeamInput, wanted: int | None, cached: int, frontend: Frontend) -> OutputDelta:
    scores = None
    if wanted is not None:
        scores = [msgspec.structs.replace(entry, top=entry.top[:wanted]) for entry in beam.logprobs]
    return OutputDelta(
        index,
        frontend.text.decode(beam.token_ids, item.sampling.skip_special_tokens),
        beam.token_ids,
        "length" if beam.is_cut else "stop",
        None if beam.is_cut or beam.token_ids[-1] in frontend.card.end_token_ids else beam.token_ids[-1],
        scores,
        cached_tokens=cached,
        num_output_tokens=len(beam.token_ids),
    )
