"""The plan of one step on the CPU (``Batch``), its tensors (``ForwardBatch``) and its outcome (``StepResult``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from fwk.types.request import Features, TokenLogprobs
from fwk.types.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class NewSequence(msgspec.Struct, array_like=True):
    """Everything a worker must know of a sequence before its first step (again after a pre-emption).

    - ``slot``: its place in the worker until it is freed.
    - ``token_ids``: prompt, followed by what was generated before a pre-emption
    - ``num_prompt_tokens``: the first of ``token_ids``.
    - ``num_computed_tokens``: found in the prefix cache
    - ``block_ids``: the blocks of those computed tokens
    - ``sampling``: of the request.
    - ``seed``: the sequence's own: the request's seed and the sequence's index make it
    - ``window_block_ids``: for each of ``block_ids``, one of each window group; or none: not read
    - ``state_source``: place of the kept state it continues from; -1: it begins with no token computed
    - ``num_encoder_tokens``: of the prompt, which an encoder reads; its decoder's begin at the next block
    - ``features``: what engine parts send the workers (``Wire.sequence``).
    - ``cache_namespace``: sequences of another one share nothing with it (``DraftView.namespaces``).
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    seed: int
    window_block_ids: list[list[int]] = []
    state_source: int = -1
    num_encoder_tokens: int = 0
    features: Features = {}
    cache_namespace: str = ""


class ScheduledSequence(msgspec.Struct, array_like=True):
    """The share of one sequence in a step.

    A chunk of a prompt, one decoded token and one token followed by drafts to verify are the same thing:
    ``num_new_tokens`` tokens from ``num_computed_tokens`` on. A worker knows the tokens it sampled itself, so the
    plan of step N+1 can be made before the tokens of step N have come back.

    - ``slot``: of the sequence.
    - ``num_new_tokens``: drafts included
    - ``samples``: with the last new token every known one is computed: a token is chosen, or the sequence ends
    - ``draft_token_ids``: the last of the new tokens, to be verified
    - ``replaced_blocks``: place in its table, and the block of the same content to use instead
    - ``new_window_block_ids``: for each of ``new_block_ids``, one of each window group
    - ``state_place``: where to keep the states of recurrent layers as the step leaves them; -1: nowhere
    - ``features``: what engine parts send the workers (``Wire.step``).
    """

    slot: int
    num_new_tokens: int
    samples: bool
    new_block_ids: list[int]
    draft_token_ids: list[int]
    replaced_blocks: list[tuple[int, int]] = []
    new_window_block_ids: list[list[int]] = []
    state_place: int = -1
    features: Features = {}


class BlockSaves(msgspec.Struct, array_like=True):
    """Blocks to copy to the cache tiers: content key and block id.

    - ``before``: as they are before the step, which may overwrite them
    - ``after``: as the step leaves them
    """

    before: list[tuple[bytes, int]]
    after: list[tuple[bytes, int]]


class Batch(msgspec.Struct, array_like=True):
    """The scheduler's plan of one step.

    - ``step``: number of the step, from 1 on.
    - ``freed_slots``: slots to forget before anything else
    - ``new``: sequences that take a slot.
    - ``sequences``: those that compute.
    - ``saves``: blocks for the cache tiers; None: none.
    """

    step: int
    freed_slots: list[int]
    new: list[NewSequence]
    sequences: list[ScheduledSequence]
    saves: BlockSaves | None = None


class SequenceResult(msgspec.Struct, array_like=True):
    """What a step made of one sequence that sampled, or of which a feature's part has something to tell.

    - ``slot``: of the sequence.
    - ``token_ids``: one, or the accepted drafts and the token after them; empty for a chunk of a prompt
    - ``logprobs``: an entry per token; None: not asked for.
    - ``draft_token_ids``: proposed for the next step
    - ``error``: this sequence failed; no other did
    - ``is_complete``: nothing may follow its last token, which is no stop token
    - ``is_refusal``: ``error`` is due to what the request asks for
    - ``runs_ahead``: from now on, steps of it may be planned while drafts of it are being verified
    - ``features``: what worker parts answer (``Wire.result``).
    """

    slot: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    draft_token_ids: list[int] = []
    error: str | None = None
    is_complete: bool = False
    is_refusal: bool = False
    runs_ahead: bool = False
    features: Features = {}

    @property
    def goes_on(self) -> bool:
        """Whether the sequence neither failed nor is complete."""
        return self.error is None and not self.is_complete


class StepResult(msgspec.Struct, array_like=True):
    """The outcome of one ``Batch``.

    - ``step``: ``Batch.step``.
    - ``sequences``: in any order.
    - ``model_seconds``: of the forward pass.
    - ``total_seconds``: of the step in the worker.
    - ``draft_seconds``: of these: what the speculative decoder took
    - ``failure``: why none of its sequences was computed, nor what others of its blocks hold
    - ``troubles``: what the worker does otherwise than was asked since a plugin failed
    """

    step: int
    sequences: list[SequenceResult]
    model_seconds: float = 0.0
    total_seconds: float = 0.0
    draft_seconds: float = 0.0
    failure: str = ""
    troubles: tuple[str, ...] = ()


@dataclass(slots=True)
class KVGroup:
    """Where the tokens of a batch live in the KV cache, for the layers that share a block table.

    - ``slot_mapping``: [num_tokens] int64: slot each token's K and V are stored at
    - ``block_table``: [num_seqs, max_blocks] int32
    - ``slot_mapping_np``: the same on the CPU (numpy): plans are made without asking the device
    - ``block_table_np``: the same on the CPU.
    """

    slot_mapping: Tensor
    block_table: Tensor
    slot_mapping_np: Any
    block_table_np: Any


@dataclass(slots=True)
class StateRows:
    """Where recurrent layers have their states of a batch's sequences: zeros before a sequence's first token.

    - ``rows``: [num_seqs] int64: of ``RecurrentState``'s tensors
    - ``rows_np``: the same on the CPU (numpy).
    """

    rows: Tensor
    rows_np: Any


@dataclass(slots=True)
class Inserted:
    """Rows that take the place of tokens' embeddings.

    - ``rows``: [n] int64: of the batch's tokens
    - ``values``: [n, hidden_size]
    """

    rows: Tensor
    values: Tensor


@dataclass(slots=True)
class ForwardBatch:
    """Inputs of one forward pass. Views of buffers allocated once: valid until the next step is prepared.

    The next step may be the same object again: then its sequences are the same, and each has one token, as before.

    Tokens of a sequence stand together, sequences in the order of the plan. ``*_np`` are CPU twins of the tensors.

    ``tree_mask[t, j]`` says whether token t sees the j-th new token of its own sequence (itself included; columns from
    the sequence's number of new tokens on mean nothing); tokens that were in the cache before are seen as ever. In a
    tree of drafts ``positions`` are depths (the parent's position + 1), so several tokens of a sequence may share one,
    while their slots are consecutive as always.

    - ``token_ids``: [num_tokens] int64
    - ``positions``: [num_tokens] int64
    - ``query_start``: [num_seqs + 1] int32: first token of each sequence
    - ``seq_lens``: [num_seqs] int32: tokens in the KV cache after this step
    - ``logits_indices``: [num_logits] int64: which of the hidden states are turned into logits
    - ``kv_groups``: by ``AttentionLayer.kv_group``; the first is that of layers that see everything.
    - ``query_start_np``: as ``query_start``.
    - ``seq_lens_np``: as ``seq_lens``.
    - ``is_decode``: every sequence has exactly one new token
    - ``hidden_indices``: [num_hidden] int64: tokens whose hidden states are wanted; None: all of them
    - ``is_greedy``: of the logits the largest of each row is all that matters
    - ``tree_mask``: [num_tokens, max_new] bool, see below; None: causal
    - ``state_rows``: of models with recurrent layers
    - ``encoder_lens_np``: [num_seqs]: leading tokens of each that an encoder reads; None: the model has none
    - ``plan``: what AttentionBackend.plan or .plan_static returned
    - ``padding``: sequences at the end that stand for nobody: the step has the size of a captured one
    - ``is_static``: inputs and plan are where captured steps of this size read them
    - ``num_fewer``: [num_seqs] int64: so many tokens fewer than ``seq_lens_np`` says, which only the device knows;
      None: none. Of attention backends with the feature ``late_lengths`` alone. Of a captured row ``positions`` are
      right already.
    - ``piece_tokens``: tokens, and zeros behind them up to a size captured in pieces; 0: not replayed
    - ``extras``: what else a model reads, by name
    - ``inserted``: None: every token is embedded as itself
    - ``is_eager``: a feature's part wants layers to be called, not replayed
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    logits_indices: Tensor
    kv_groups: list[KVGroup]
    query_start_np: Any
    seq_lens_np: Any
    is_decode: bool
    hidden_indices: Tensor | None = None
    is_greedy: bool = False
    tree_mask: Tensor | None = None
    state_rows: StateRows | None = None
    encoder_lens_np: Any = None
    plan: Any = None
    padding: int = 0
    is_static: bool = False
    num_fewer: Tensor | None = None
    piece_tokens: int = 0
    extras: dict[str, Any] = field(default_factory=dict[str, Any])
    inserted: Inserted | None = None
    is_eager: bool = False

    @property
    def is_of_tokens(self) -> bool:
        """Whether tokens, and their places, are all that the model is given, and nothing is asked of its layers."""
        return not self.extras and self.inserted is None and not self.is_eager

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return int(self.token_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        """Padding included."""
        return int(self.seq_lens.shape[0])
