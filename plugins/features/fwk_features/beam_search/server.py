"""The part in the server, and in ``fwk.LLM``: asks for the scores of each step's texts, and replies with the best."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from fwk import Completion, SamplingParams
from fwk.errors import InvalidRequest, RequestFailed
from fwk.interfaces.dialect import EmbedInput, Frontend, GenerateInput, OutputDelta
from fwk.interfaces.feature import ServerPart
from fwk.types import TokenLogprobs
from fwk_features.beam_search.search import Beam, BeamSearch, EarlyStopping

NAME = "beam_search"

Prompt = str | list[int]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Beams:
    """How a prompt's texts are searched for: ``num_beams`` at a time; see ``BeamSearch``."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


class BeamSearchServer(ServerPart):
    """Makes the replies to inputs that ask for a search."""

    def check(self, item: GenerateInput | EmbedInput) -> None:
        beams = _beams(item)
        if beams is not None:
            self._search(item, beams)

    def answer(self, item: GenerateInput | EmbedInput) -> AsyncGenerator[list[OutputDelta], None] | None:
        beams = _beams(item)
        if beams is None or not isinstance(item, GenerateInput):
            return None
        assert self.context.frontend is not None
        return _searched(self.context.frontend, item, self._search(item, beams))

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"beam_search": self.beam_search}

    def _search(self, item: GenerateInput | EmbedInput, beams: Beams) -> BeamSearch:
        """Raises ``InvalidRequest`` for more beams than can be scored."""
        frontend, sampling = self.context.frontend, item.sampling
        assert frontend is not None
        ends = () if sampling.ignore_eos else frontend.card.end_token_ids
        ends = tuple(dict.fromkeys([*ends, *sampling.stop_token_ids]))
        most = sampling.max_tokens or frontend.card.max_model_len - len(item.prompt_token_ids)
        return BeamSearch(beams.num_beams, ends, most, beams.length_penalty, beams.early_stopping)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        num_beams: int,
        max_tokens: int = 16,
        *,
        n: int = 1,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        ignore_eos: bool = False,
        **fields: Any,
    ) -> list[list[Completion]]:
        """The ``n`` best of ``num_beams`` texts for each prompt, best first; see ``BeamSearch``. ``fwk.LLM`` has it.

        ``fields``: of other features, such as ``adapter``. Raises ``InvalidRequest``, also for more beams than the
        engine can score.
        """
        context = self.context
        assert context.prepare is not None, "operations are fwk.LLM's"
        assert context.compute is not None
        if not 1 <= n <= num_beams:
            raise InvalidRequest(f"n must be between 1 and num_beams ({num_beams}), not {n}", "n")
        ends = () if ignore_eos else context.end_token_ids
        items = context.prepare(prompts, SamplingParams(max_tokens=max_tokens), 1, **fields)
        searches = [BeamSearch(num_beams, ends, max_tokens, length_penalty, early_stopping) for _ in items]
        while any(not search.is_done for search in searches):
            steps = [
                step
                for item, search in zip(items, searches, strict=True)
                if not search.is_done
                for step in _steps(item, search, SamplingParams())
            ]
            scores = iter(context.compute(steps, False))
            for search in searches:
                if not search.is_done:
                    search.update([(next(scores).logprobs or [])[0] for _ in search.running])
        return [
            [
                Completion(
                    text=context.text.decode(beam.token_ids),
                    token_ids=beam.token_ids,
                    finish_reason="length" if beam.is_cut else "stop",
                    logprobs=beam.logprobs,
                    prompt_token_ids=item.prompt_token_ids,
                )
                for beam in search.best(n)
            ]
            for item, search in zip(items, searches, strict=True)
        ]


def _beams(item: GenerateInput | EmbedInput) -> Beams | None:
    """What an input asks for; None: it does not."""
    wanted = item.extras.get(NAME) if isinstance(item, GenerateInput) else None
    return None if wanted is None else Beams(**wanted)


def _steps(item: GenerateInput, search: BeamSearch, sampling: SamplingParams) -> list[GenerateInput]:
    """What scores the next token of each text that is continued."""
    sampling = msgspec.structs.replace(
        sampling, max_tokens=1, temperature=0.0, ignore_eos=True, stop_token_ids=[], logprobs=search.num_candidates
    )
    item = replace(item, sampling=sampling, n=1, extras={})
    return [replace(item, prompt_token_ids=[*item.prompt_token_ids, *beam.token_ids]) for beam in search.running]


async def _searched(
    frontend: Frontend, item: GenerateInput, search: BeamSearch
) -> AsyncGenerator[list[OutputDelta], None]:
    """The whole texts, best first, when the search is over. Closing it ends the search."""
    wanted, cached = item.sampling.logprobs, 0
    while not search.is_done:
        scores = await _all(_scored(frontend, step) for step in _steps(item, search, item.sampling))
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


def _delta(
    index: int, beam: Beam, item: GenerateInput, wanted: int | None, cached: int, frontend: Frontend
) -> OutputDelta:
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
