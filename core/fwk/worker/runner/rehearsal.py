"""Steps as large as a run's may be, of sequences that mean nothing, before the KV cache has its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fwk.errors import ConfigError
from fwk.types import Batch, Features, NewSequence, SamplingParams, ScheduledSequence, StepResult
from fwk.types.sampling import MAX_LOGPROBS

SAMPLING = SamplingParams(
    max_tokens=2**20,
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=MAX_LOGPROBS,
    ignore_eos=True,
)
"""All that a request may ask of the sampler at once, but for a grammar."""
PLAIN = SamplingParams(max_tokens=2**20, temperature=0.0, ignore_eos=True)


Told = Callable[[int], Features]


class Rehearsed(Protocol):
    """The runner's part in it."""

    def launch(self, batch: Batch) -> Any: ...

    def collect(self, pending: Any) -> StepResult: ...

    def forget(self, slots: list[int]) -> None: ...

    def replace_drafts(self, slots: list[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class LargestStep:
    """What bounds a run's steps.

    num_seqs: at once. num_tokens: of a step. seq_len: tokens of the longest sequence that the KV cache can hold.
    max_drafts: for one sequence. num_window_groups: as in ``WorkerInfo``. generates: tokens are chosen.
    """

    num_seqs: int
    num_tokens: int
    seq_len: int
    page_size: int
    max_drafts: int = 0
    num_window_groups: int = 0
    generates: bool = True
    needs_whole_prompts: bool = False

    def small(self) -> LargestStep:
        """Steps of the same kinds, and as short as they can be."""
        num_tokens = min(self.num_tokens, 8 * (1 + self.max_drafts))
        seq_len = min(self.seq_len, num_tokens + 2 * self.max_drafts + 2)
        return replace(self, num_seqs=min(self.num_seqs, 2), num_tokens=num_tokens, seq_len=seq_len)

    def rehearse(self, runner: Rehearsed, told: Told = lambda number: {}) -> None:
        """Run the largest steps: many prompts, a token and drafts of each after them, the end of the longest prompt.

        Every place in the block tables is block 0, which all share: what attention computes means nothing. told:
        to features' parts, of each sequence by its number. Raises ``ConfigError`` where the device has too little
        memory for such steps.
        """
        try:
            self._many(runner, told)
            self._longest(runner, told)
        except torch.OutOfMemoryError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"the largest step, {self.num_tokens} tokens of {self.num_seqs} sequences, does not fit next to the "
                f"weights ({reason}): lower --max-prefill-tokens or --max-running-requests, or take a smaller model, "
                "or one in fewer bits"
            ) from error

    def _many(self, runner: Rehearsed, told: Told) -> None:
        room = max(1, self.seq_len - 2 * self.max_drafts - 2)  # for what follows
        count = min(self.num_seqs, self.num_tokens)
        each, more = divmod(self.num_tokens, count)
        lengths = [min(each + (slot < more), room) for slot in range(count)]
        result = self._prompts(runner, lengths, [0] * count, SAMPLING, told)
        drafts = {done.slot: done.draft_token_ids for done in result.sequences if done.error is None}
        without = [slot for slot, own in drafts.items() if not own]
        drafts |= dict.fromkeys(without, [0] * self.max_drafts)  # where the decoder found nothing to draft: a chain
        runner.replace_drafts(without)
        if self.generates:
            step, left = list[ScheduledSequence](), self.num_tokens
            for slot, own in drafts.items():
                left -= 1 + len(own)
                if left >= 0 and lengths[slot] + 1 + len(own) <= self.seq_len:
                    step.append(ScheduledSequence(slot, 1 + len(own), True, [], own))
            if step:
                runner.collect(runner.launch(Batch(0, [], [], step)))
        runner.forget(list(range(count)))

    def _longest(self, runner: Rehearsed, told: Told) -> None:
        length = max(1, self.seq_len - 2 * self.max_drafts - 2)
        new = min(length, self.num_tokens)
        if self.needs_whole_prompts:
            length = new
        self._prompts(runner, [length], [length - new], PLAIN, told)
        runner.forget([0])

    def _prompts(
        self,
        runner: Rehearsed,
        lengths: list[int],
        computed: list[int],
        sampling: SamplingParams,
        told: Told,
    ) -> StepResult:
        """Compute prompts to their ends, from the tokens on that count as computed. A slot for each, from 0 on."""
        new: list[NewSequence] = []
        step: list[ScheduledSequence] = []
        for slot, (length, start) in enumerate(zip(lengths, computed, strict=True)):
            held = -(-start // self.page_size)
            blocks = -(-min(length + 2 * self.max_drafts + 2, self.seq_len) // self.page_size)
            new.append(
                NewSequence(
                    slot,
                    [0] * length,
                    length,
                    start,
                    [0] * held,
                    sampling if self.generates else SamplingParams(max_tokens=1),
                    slot,
                    self._windows(held),
                    features=told(slot),
                )
            )
            more = blocks - held
            step.append(ScheduledSequence(slot, length - start, True, [0] * more, [], [], self._windows(more)))
        return runner.collect(runner.launch(Batch(0, [], new, step)))

    def _windows(self, count: int) -> list[list[int]]:
        return [[0] * self.num_window_groups] * count if self.num_window_groups else []
