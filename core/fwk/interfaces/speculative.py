"""Speculative decoding: a decoder proposes, core verifies and rolls back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from fwk.interfaces.declaration import Ask, Declaration, Facts
from fwk.interfaces.device import Upload

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fwk.interfaces.model import Model, ModelContext
    from fwk.types import ForwardBatch

T = TypeVar("T")


class DraftSteps(ABC):
    """How a decoder with a model of its own runs it over the sequences of a ``DraftView``. Supplied by core."""

    @abstractmethod
    def batch(self, rows: np.ndarray, token_ids: Sequence[int] | Tensor, ahead: int) -> ForwardBatch:
        """Inputs of a forward pass over one token of each sequence: ``token_ids[i]`` for row ``rows[i]`` of the view.

        A tensor of them, [num_rows] int64, may be on the device; below 0 stands for a token whose drafts mean nothing.

        The token stands ``ahead`` places after the newest known one (0: it is that one), and needs ``ahead`` to be
        less than the row's ``max_drafts``. Its K and V go to the sequence's own blocks, for the layers that run.
        For a head, whose K and V of a token stand where the token before it does, pass the token that comes after it:
        the first draft, with ``ahead`` 0, at the place of the newest known token.
        """

    @abstractmethod
    def nodes(
        self,
        rows: np.ndarray,
        token_ids: Sequence[Sequence[int]] | Tensor,
        parents: Sequence[Sequence[int]] | Tensor,
    ) -> ForwardBatch:
        """Inputs of a forward pass over the trees of drafts that grow from the sequences, for the head of a target.

        ``token_ids[i]`` and ``parents[i]`` are the nodes of row ``rows[i]``, as in ``Drafts``; there are fewer of them
        than the row's ``max_drafts``. A node sees the sequence and the nodes it follows. As a head's K and V of a token
        stand where the token before it does, the first node's are at the place of the newest known token. Tensors,
        [num_rows, num_nodes] int64 each, may be on the device.
        """

    @abstractmethod
    def pick(self, logits: Tensor, rows: np.ndarray, ahead: int) -> list[int]:
        """What the sequences' own sampling settings make of ``logits`` [num_rows, vocab_size].

        For the place after the token that ``batch`` put ``ahead``. Seed and place are those the target's own pick
        will have, so a draft is the target's choice wherever the two distributions are close ("coupling without
        communication", Daliri, Musco, Suresh 2024). -1: no more drafts for this row. Waits for the device.
        """

    @abstractmethod
    def choose(self, logits: Tensor, rows: np.ndarray, ahead: int) -> Tensor:
        """The same where the logits are, [num_rows] int64, in memory of its own.

        Waits for the device only where a processor that a row asked for reads the text (``reads_history``).
        """


@dataclass(slots=True)
class DraftView:
    """The sequences that could use drafts after a step.

    - ``slots``: [num_seqs] int64
    - ``num_tokens``: [num_seqs] int64: tokens known of each sequence, the newest included
    - ``max_drafts``: [num_seqs] int64: most that may be proposed for each
    - ``token_ids``: [num_slots, max_model_len + 1] int32
    - ``steps``: passes of a model of the decoder's own over them
    - ``ahead``: [num_seqs] int64: tokens that a launched step may add, of a decoder that ``drafts_ahead``; of a tree,
      along its longest path. A proposal then begins with what these may be, one after another, and has so many tokens
      more than ``max_drafts`` allows; 0: there is no such step. In a tree the first child of each node is held to be
      right.
    - ``newest``: [num_seqs] int64 on the device: the newest token of each, of a decoder that ``drafts_late``, where
      only the device knows it, and how many of the step's drafts were accepted. ``num_tokens`` then counts all of them,
      and ``token_ids`` does not hold them; ``steps`` puts tokens where they belong. None: the host knows both.
    - ``namespaces``: [num_slots]: of each slot's sequence the namespace of its K/V: what a request's ``cache_salt``,
      its adapter and the like make of it. A decoder that drafts for one sequence what it has seen in another keeps them
      apart by it: clients could else tell from the time of a reply what others have said.
    """

    slots: np.ndarray
    num_tokens: np.ndarray
    max_drafts: np.ndarray
    token_ids: np.ndarray
    steps: DraftSteps
    ahead: np.ndarray | int = 0
    newest: Tensor | None = None
    namespaces: Sequence[str] = ()


@dataclass(slots=True)
class Drafts:
    """Proposed continuations, each with its own depth (empty is fine).

    ``parents[i][j]`` is the index in ``token_ids[i]`` of token j's parent in a tree, -1 for the sequence's end;
    parents come before their children. None means chains. ``probabilities`` are the distributions that the tokens of
    chains were drawn from; None means they were certain (or drawn with the target's own seeds, by ``pick``).

    ``token_ids`` and ``parents`` may be tensors, [num_seqs, n] int64, of which a row's first ``counts`` count, in a
    chain no further than to one below 0. On a device they stay there until they are verified: nothing waits for them.

    - ``probabilities``: [sum of depths, vocab_size] float32
    - ``counts``: [num_seqs] int64: with tensors
    """

    token_ids: list[list[int]] | Tensor
    parents: list[list[int]] | Tensor | None = None
    probabilities: Tensor | None = None
    counts: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How probable a sampled draft must be to be kept, beyond what keeps the target's distribution.

    A draft the target gives at least ``single`` is always kept, any other with its probability divided by ``scale``.
    With both at 1 the distribution is the target's. Greedy sequences keep what the target picks, whatever these say.
    """

    single: float = 1.0
    scale: float = 1.0

    @property
    def is_exact(self) -> bool:
        """Whether the distribution stays the target's."""
        return self.single >= 1.0 and self.scale >= 1.0


@dataclass(slots=True)
class Verified:
    """What became of the last drafts.

    - ``slots``: [num_seqs] int64
    - ``num_drafts``: [num_seqs] int64
    - ``num_accepted``: [num_seqs] int64
    """

    slots: np.ndarray
    num_drafts: np.ndarray
    num_accepted: np.ndarray


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What the target made of a step, once its drafts were verified: the tokens that stand, sequence by sequence.

    A head that drafts computes a token's K and V from the token's hidden state and the token after it (EAGLE,
    arXiv:2401.15077): ``batch()`` is the input of such a pass, the tokens after these at these tokens' places, with
    each sequence's last one as the wanted token. It is valid until the next batch is asked for.

    Of a decoder that ``drafts_late`` only the device may know which tokens stand: then rejected ones follow them, up to
    the next sequence's, and mean nothing; nothing that stands sees them.

    - ``slots``: [num_seqs] int64
    - ``query_start``: [num_seqs + 1] int64: first token of each sequence
    - ``hidden``: [num_tokens, hidden_size]: what the target's logits are made of
    - ``taps``: [num_tokens, hidden_size] each, in the order they were asked for
    - ``last``: [num_seqs] int64, where ``hidden`` is: each sequence's last token that stands
    """

    slots: np.ndarray
    query_start: np.ndarray
    hidden: Tensor
    taps: tuple[Tensor, ...]
    batch: Callable[[], ForwardBatch]
    last: Tensor


class HeadMaker(Protocol):
    """``SpeculativeContext.build``."""

    def __call__(self, make: Callable[[ModelContext], T], checkpoint: str | None) -> T: ...


@dataclass(frozen=True, slots=True)
class SpeculativeContext:
    """What a decoder is built with.

    ``load_model(name)`` opens and builds another model, whose attention layers get a place in the target's KV cache
    alongside its own: same blocks, same backend. It must have the target's vocabulary. A name, here and for ``build``,
    may end in ``@`` and a revision of the hub.

    ``build(make, checkpoint)`` returns what ``make`` builds of a context for layers that join them likewise: with the
    weights of a checkpoint that need not be a whole model, or, with None, of the target's own. A config.json that has
    no ``hidden_size`` is read as an addition to the target's. Tensors that nobody read are an error.

    ``tap(layers)`` asks for the target's residual stream as it comes to these layers (``TargetStep.taps``).

    ``encode(text)`` returns a text's tokens, without special ones around them.

    ``is_host``: the target is computed on a CPU, which a step's rows keep busy as soon as there are several.

    ``upload``: core's own way to the device; ``send`` takes it.

    - ``num_slots``: most sequences at once: slots are below it.
    - ``max_model_len``: tokens of prompt and output together.
    - ``vocab_size``: width of the target's logits.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``target``: the served model; None only in tests of decoders that read none.
    - ``num_target_layers``: of the target.
    """

    num_slots: int
    max_model_len: int
    vocab_size: int
    load_model: Callable[[str], Model]
    options: Any = None
    target: Model | None = None
    num_target_layers: int = 0
    build: HeadMaker | None = None
    tap: Callable[[Sequence[int]], None] | None = None
    encode: Callable[[str], list[int]] | None = None
    is_host: bool = False
    upload: Upload | None = None

    @property
    def send(self) -> Upload:
        """Brings an array to the device without the host waiting; on a CPU it is the array's own memory."""
        if self.upload is not None:
            return self.upload
        import torch  # noqa: PLC0415 - declarations import this module, and are light

        return torch.from_numpy  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class SpeculativeDecoder(ABC):
    """Worker side; may own layers in the KV cache.

    - ``max_drafts``: most drafts it proposes for one sequence. The scheduler keeps blocks for that many tokens ahead of
      each.
    - ``acceptance``: of its drafts, in chains: anything else than the default changes the distribution, and only a user
      may say so.
    - ``reads_hidden``: whether ``learn`` is called: the target then computes the hidden states of all tokens.
    - ``drafts_ahead``: whether its drafts are in lists, without probabilities, and follow from the known text alone,
      further than a step's drafts: then the next step is planned while one with drafts is in flight
      (``DraftView.ahead``).
    - ``drafts_late``: whether its drafts are in tensors, without probabilities, that it can make of what only the
      device knows (``DraftView.newest``, ``TargetStep.last``): then ``learn`` and ``propose`` are called as soon as a
      step is launched, before its result is known, and ``observe`` a step later.
    - ``drafts_trees``: of a decoder that drafts ahead or late: whether its drafts may be trees. Sampled sequences then
      do not run ahead.
    """

    max_drafts: int

    acceptance: Acceptance = Acceptance()

    reads_hidden: ClassVar[bool] = False

    def __init__(self, context: SpeculativeContext) -> None:
        self.context = context

    drafts_ahead: bool = False

    drafts_late: bool = False

    drafts_trees: bool = False

    @property
    def max_passes(self) -> int:
        """Most forward passes it makes between two of the target's: their inputs have room side by side."""
        return self.max_drafts + 1

    @property
    def max_levels(self) -> int:
        """Most drafts of a tree that follow one another: K/V of so many are moved where the device finds the path."""
        return self.max_drafts

    def follow(self, batch: ForwardBatch) -> None:
        """The target has computed these tokens; a model of one's own computes its K and V of them too."""

    def learn(self, step: TargetStep) -> None:
        """Told what the target computed of the tokens that stand after a step, before ``observe`` and ``propose``."""

    @abstractmethod
    def propose(self, view: DraftView) -> Drafts:
        """Drafts for the next step, one list per sequence of ``view``."""

    def observe(self, verified: Verified) -> None:
        """Told how many drafts were accepted, before the next ``propose``."""

    def forget(self, slots: Sequence[int]) -> None:
        """These slots' sequences are gone."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeDecoderSpec(Declaration):
    """Declares a speculative decoder (``--speculative-algorithm``).

    Override ``required_features`` for a decoder that proposes trees.
    """

    family: ClassVar[str] = "speculative"

    def required_features(self, options: Any) -> frozenset[str]:
        """What it asks of the attention backend, in the words of ``AttentionBackendSpec.features`` (``tree_mask``).

        options: the plugin's own, validated.
        """
        return frozenset()

    def refusal(self, facts: Facts) -> str | None:
        if facts.pp_size > 1:
            stages = f"--pipeline-parallel-size {facts.pp_size}"
            return f"has its drafts verified where they are embedded, and {stages} divides the two: leave one out"
        return super().refusal(facts)

    def asks_of(self, facts: Facts, options: Any) -> tuple[Ask, ...]:
        needed = self.required_features(options)
        return (*self.asks, Ask("attention", needed)) if needed else self.asks

    def facts_with(self, facts: Facts, options: Any) -> Facts:
        is_tree = any("tree_mask" in ask.features for ask in self.asks_of(facts, options))
        return replace(super().facts_with(facts, options), drafts="tree" if is_tree else "chain")
