"""Choosing tokens: logits processors edit, the sampler picks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration
from fwk.interfaces.device import Upload, upload_to
from fwk.interfaces.native import NO_THREADS, NativeThreads
from fwk.types import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from fwk.interfaces.dialect import TextTools


@dataclass(slots=True)
class LogitsView:
    """The sequences behind the rows of a logits tensor. A sequence whose drafts are verified has several rows.

    ``token_ids[slot, :num_tokens[row]]`` are the tokens before the position a row's logits are for, the first
    ``num_prompt_tokens[row]`` of them the prompt. All arrays are the worker's own: read, don't write.

    - ``slots``: [num_rows] int64
    - ``num_tokens``: [num_rows] int64
    - ``num_prompt_tokens``: [num_rows] int64
    - ``token_ids``: [num_slots, max_model_len] int32
    - ``seeds``: [num_rows] uint64: the sequences' seeds; a worker always has them
    - ``refusals``: what a processor adds on a device, where it cannot raise ``BlameSequence`` without waiting: rows
      [num_rows] bool in which no token is left, and why. Core refuses their sequences once the step is collected.
    - ``has_drafts``: whether some of these texts may end in drafts, which need not stay. Else a text only grows from
      view to view.
    """

    slots: np.ndarray
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray
    token_ids: np.ndarray
    seeds: np.ndarray | None = None
    refusals: list[tuple[Tensor, str]] = field(default_factory=lambda: list[tuple["Tensor", str]]())
    has_drafts: bool = False


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What samplers and logits processors are built with. ``threads`` runs native operators.

    ``token_bytes()`` has the bytes of every token id; it may take a second when it is first called.

    - ``vocab_size``: width of the logits.
    - ``num_slots``: most sequences at once: slots are below it.
    - ``device``: where logits are.
    - ``eos_token_ids``: tokens that end a text; may be empty.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``upload``: core's own way to the device; ``send`` takes it.
    - ``text``: ``text()`` is the model's tokenizer; it may take a second when it is first called. None: in tests alone.
    """

    vocab_size: int
    num_slots: int
    device: torch.device
    eos_token_ids: tuple[int, ...]
    options: Any = None
    threads: NativeThreads = NO_THREADS
    token_bytes: Callable[[], Sequence[bytes]] = list
    upload: Upload | None = None
    text: Callable[[], TextTools] | None = None

    @property
    def send(self) -> Upload:
        """Brings what ``apply`` or ``sample`` needs there to the device."""
        return self.upload or upload_to(self.device)


class LogitsProcessor(ABC):
    """A small state object for all sequences of a worker: a row of settings per slot.

    only_masks: ``apply`` does nothing but set logits to -inf, in place, the same ones when it is called again for the
    same view. Where only such processors are asked, they are given the model's own logits, of any precision.

    - ``reads_history``: whether ``apply`` reads ``LogitsView.token_ids``. On a device it is then called when the step
      before, whose tokens the host has not seen, is collected, while the model computes this one; a processor that says
      False is called at once, and finds no newer ones there.
    - ``reads_places``: whether ``apply`` reads ``LogitsView.num_tokens`` or the text. While drafts are being verified
      only a device may know how many tokens there are: steps of a sequence are planned then only if all that it asks
      for say False.
    """

    only_masks: ClassVar[bool] = False
    reads_history: ClassVar[bool] = True
    reads_places: ClassVar[bool] = True

    def __init__(self, context: SamplingContext) -> None:
        self.context = context

    @abstractmethod
    def add(self, slot: int, params: SamplingParams) -> bool:
        """A sequence takes ``slot``. Return whether its ``params`` ask anything of this processor."""

    @abstractmethod
    def remove(self, slot: int) -> None:
        """The sequence of a slot for which ``add`` returned True is gone."""

    @abstractmethod
    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        """Edit the rows of the slots that asked, leave the others as they are. May work in place.

        logits: [num_rows, vocab_size] float32 (but see ``only_masks``). Called only when a row's slot asked. Raise
        ``BlameSequence`` when the failure belongs to one slot.
        """

    def ends(self, slot: int, token_ids: Sequence[int]) -> int | None:
        """Told the tokens a step gave a slot that asked: how many of them stand when the output is complete with them.

        None while it may continue. Whoever overrides this is called after every step that sampled for such a slot.
        """
        return None

    def ends_each(self, slots: Sequence[int], token_ids: Sequence[int]) -> dict[int, int | Exception]:
        """``ends`` of slots [n] that gained a token each: by slot, what it returned but None, or raised.

        Only who overrides ``ends`` may override this, where one call costs less than many.
        """
        found: dict[int, int | Exception] = {}
        for slot, token_id in zip(slots, token_ids, strict=True):
            try:
                stand = self.ends(slot, [token_id])
            except Exception as error:
                found[slot] = error
                continue
            if stand is not None:
                found[slot] = stand
        return found

    def close(self) -> None:
        """No sequence asks it any more, and none will."""


@dataclass(frozen=True, kw_only=True)
class LogitsProcessorSpec(Declaration):
    """Declares a logits processor; every installed one takes part, in ascending ``order``.

    order: 100 masks and bias, 200 penalties, 300 temperature, 400 truncation; grammar masks come before all.
    params: a pydantic model of request fields this processor reads from ``SamplingParams.extra``; the HTTP dialect
    accepts and validates them. None for the standard fields.
    """

    family: ClassVar[str] = "logits_processors"

    order: int = 100
    params: type[Any] | None = None


@dataclass(slots=True)
class SamplingRows:
    """Per row of the logits: how to pick.

    - ``is_greedy``: [num_rows] bool
    - ``seeds``: [num_rows] uint64: the sequence's seed
    - ``positions``: [num_rows] int64: place in the sequence of the token being picked
    - ``all_greedy``: whether ``is_greedy`` is True for each row.
    - ``unfinished``: [num_rows] int64: slots of the rows for which the work of the processors that the sampler
      ``finishes`` is left to it, -1 for others; None: there are no such rows.
    - ``num_fewer``: [num_rows] int64 where the logits are: so much less than ``positions`` says is a row's position, as
      only the device knows. Of a sampler with ``late_positions``; None: of all rows nothing.
    - ``most_fewer``: no number in ``num_fewer`` is larger.
    """

    is_greedy: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    all_greedy: bool
    unfinished: np.ndarray | None = None
    num_fewer: Tensor | None = None
    most_fewer: int = 0


class Sampler(ABC):
    """Picks token ids from processed logits."""

    def __init__(self, context: SamplingContext) -> None:
        self.context = context

    def add(self, slot: int, params: SamplingParams) -> None:
        """A sequence takes ``slot``. Of interest to samplers that do the work of processors."""

    @abstractmethod
    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """[num_rows, vocab_size] of any precision to [num_rows] int64, valid until the next call.

        The logits are left as they are. A recorded step's are the same tensor each time, with other numbers.

        A row's pick depends on its logits, seed and position (less ``num_fewer``) alone: never on the other rows or on
        earlier calls. -inf logits are never picked. A row with NaN or +inf, or without a finite logit, gets -1. Greedy
        picks the first of equals.
        """

    def mask(self, logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
        """Set to -inf, in place, what a grammar does not allow in some rows.

        logits: [num_rows, vocab_size] of any precision; rows: [n] int64, each at most once; masks:
        [n, ceil(vocab_size / 32)] int32, contiguous, where bit b of word w stands for token 32 * w + b and is set for
        what is allowed.
        """
        import numpy as np  # noqa: PLC0415 - declarations import this module, and are light
        import torch  # noqa: PLC0415

        packed = self.context.send(masks)
        places = torch.arange(32, dtype=torch.int32, device=packed.device)
        forbidden = ((packed.unsqueeze(-1) >> places) & 1).eq(0).view(len(masks), -1)[:, : logits.shape[1]]
        if len(rows) == len(logits) and np.array_equal(rows, np.arange(len(rows))):
            logits.masked_fill_(forbidden, -torch.inf)
            return
        index = self.context.send(rows)
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(forbidden, -torch.inf))


@dataclass(frozen=True, kw_only=True)
class SamplerSpec(Declaration):
    """Declares a sampler (``--sampling-backend``).

    finishes: names of logits processors whose work it does itself when they are the last in order of all installed
    ones. They then run only for rows whose processed logits core itself needs.
    late_positions: it heeds ``SamplingRows.num_fewer``: positions that only the device knows. Without, no step is
    planned while drafts of a sequence with a temperature are being verified.
    """

    family: ClassVar[str] = "samplers"

    finishes: tuple[str, ...] = ()
    late_positions: bool = False
