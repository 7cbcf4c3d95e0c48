"""The part in each worker: scores the prompt tokens that follow those of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
import numpy as np
from torch import Tensor

from fwk.interfaces.feature import LoadedModel, WorkerPart, WorkerPartContext
from fwk.interfaces.logprobs import ROWS_AT_ONCE, packed_logprobs, unpacked_logprobs
from fwk.interfaces.model import Model
from fwk.types import Batch, ForwardBatch, NewSequence, TokenLogprobs
from fwk.types.sampling import MAX_LOGPROBS
from fwk_features.prompt_logprobs import Scored, StepScores

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Prompt:
    """token_ids: [num_tokens] int64. num_computed: tokens of it before the step to come."""

    num_top: int
    token_ids: np.ndarray
    num_computed: int

    @property
    def is_left(self) -> bool:
        """Whether tokens follow that are still to be scored."""
        return self.num_computed < len(self.token_ids) - 1


@dataclass(slots=True)
class _Scores:
    """Of a sequence in a step. packed: on the host, ``packed_logprobs`` of some tokens each, and these tokens."""

    slot: int
    num_top: int
    packed: list[tuple[Tensor, list[int]]] = field(default_factory=list[tuple[Tensor, list[int]]])

    def entries(self) -> list[TokenLogprobs]:
        """One per token, once the copies are whole."""
        found: list[TokenLogprobs] = []
        for packed, token_ids in self.packed:
            found += unpacked_logprobs(packed, token_ids, [self.num_top] * len(token_ids))
        return found


class PromptLogprobsWorker(WorkerPart):
    """Reads the hidden states of prompts' tokens; steps after a prompt cost nothing."""

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._prompts: dict[int, _Prompt] = {}
        self._model: Model | None = None

    def model_loaded(self, loaded: LoadedModel) -> None:
        self._model = cast(Model, loaded.model)  # one that pools is not given this part

    def rehearsal(self) -> Sequence[Scored]:
        return (Scored(MAX_LOGPROBS),)

    def begin(self, new: NewSequence, asked: Scored) -> None:
        token_ids = np.array(new.token_ids[: new.num_prompt_tokens], np.int64)
        self._prompts[new.slot] = _Prompt(asked.num_top, token_ids, new.num_computed_tokens)

    def forget(self, slot: int) -> None:
        self._prompts.pop(slot, None)

    def wants_hidden(self, slots: np.ndarray) -> bool:
        return any(slot in self._prompts and self._prompts[slot].is_left for slot in slots.tolist())

    def computed(
        self, batch: Batch, forward: ForwardBatch, hidden: Tensor, logits: Tensor | None
    ) -> Sequence[_Scores] | None:
        found: list[_Scores] = []
        for i, scheduled in enumerate(batch.sequences):
            prompt = self._prompts.get(scheduled.slot)
            if prompt is not None and prompt.is_left:
                start, end = int(forward.query_start_np[i]), int(forward.query_start_np[i + 1])
                found.append(self._scores(scheduled.slot, prompt, hidden[start:end]))
        return found or None

    def _scores(self, slot: int, prompt: _Prompt, hidden: Tensor) -> _Scores:
        """hidden: [num_tokens, hidden_size] of the prompt's next tokens."""
        assert self._model is not None
        found = _Scores(slot, prompt.num_top)
        first = prompt.num_computed + 1
        wanted = prompt.token_ids[first : first + len(hidden)]
        prompt.num_computed += len(hidden)
        for start in range(0, len(wanted), ROWS_AT_ONCE):
            token_ids = wanted[start : start + ROWS_AT_ONCE]
            logits = self._model.logits(hidden[start : start + len(token_ids)].contiguous())
            packed = packed_logprobs(logits, self.context.send(token_ids), max(prompt.num_top, 1))
            found.packed.append((self.context.to_host(packed), token_ids.tolist()))
        return found

    def results(self, made: Sequence[_Scores]) -> Mapping[int, StepScores]:
        results: dict[int, StepScores] = {}
        for one in made:
            entries = one.entries()
            results[one.slot] = StepScores(len(entries), msgspec.Raw(_encode(entries)))
        return results
