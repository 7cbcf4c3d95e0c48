"""Penalties on tokens that the text already holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows, entries


@dataclass(slots=True)
class _Settings:
    repetition: float
    frequency: float
    presence: float
    prompt_ids: np.ndarray | None = None  # [n] int32, each once; a slot's prompt never changes, so found only once


class Penalties(LogitsProcessor):
    """First ``repetition_penalty``, over prompt and output (Keskar et al. 2019, CTRL, section 4.1): positive logits
    are divided by it, negative ones multiplied. Then ``frequency_penalty`` times the number of occurrences, and
    ``presence_penalty`` once, over the output alone (OpenAI's definition).
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._settings: dict[int, _Settings] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        settings = _Settings(params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if settings == _Settings(1.0, 0.0, 0.0):
            return False
        self._settings[slot] = settings
        return True

    def remove(self, slot: int) -> None:
        del self._settings[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        repeats: list[tuple[int, np.ndarray]] = []
        repeat_penalties: list[float] = []
        outputs: list[tuple[int, np.ndarray]] = []
        amounts: list[tuple[float, float]] = []
        for row, settings in asked_rows(self._settings, view):
            prompt, output = _split(view, row)
            if settings.repetition != 1.0:
                if settings.prompt_ids is None:
                    settings.prompt_ids = np.unique(prompt)
                repeats.append((row, np.concatenate((settings.prompt_ids, output))))
                repeat_penalties.append(settings.repetition)
            if len(output) and (settings.frequency or settings.presence):
                outputs.append((row, output))
                amounts.append((settings.frequency, settings.presence))
        if repeats:
            _penalise_repeats(logits, repeats, repeat_penalties, self.context)
        if outputs:
            places, ids, counts = _count([output for _, output in outputs], self.context.vocab_size)
            frequency, presence = np.array(amounts).T
            rows = np.array([row for row, _ in outputs])[places]
            send = self.context.send
            amount = (frequency[places] * counts + presence[places]).astype(np.float32)
            logits[send(rows), send(ids)] -= send(amount)
        return logits


def _split(view: LogitsView, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output of a row, both [n] int32."""
    tokens, num_prompt = view.token_ids[view.slots[row]], view.num_prompt_tokens[row]
    return tokens[:num_prompt], tokens[num_prompt : view.num_tokens[row]]


def _count(parts: list[np.ndarray], vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The different ids of each part, [n] int64 each: the part's place, the id, and how often it occurs there.

    One sort of all parts together.
    """
    places = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    ordered = np.sort(places * vocab_size + np.concatenate(parts))
    starts = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, [len(ordered)]))
    found = ordered[starts[:-1]]
    return found // vocab_size, found % vocab_size, starts[1:] - starts[:-1]


def _penalise_repeats(
    logits: Tensor, parts: list[tuple[int, np.ndarray]], penalties: list[float], context: SamplingContext
) -> None:
    """In place. An id listed twice is read twice before it is written twice with the same value: no harm."""
    index = entries(parts, context)
    penalty = np.repeat(np.array(penalties, np.float32), [len(ids) for _, ids in parts])
    factor = context.send(penalty)
    values = logits[index]
    logits[index] = torch.where(values > 0, values / factor, values * factor)
