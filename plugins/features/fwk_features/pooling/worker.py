"""The part in each worker: from hidden states to vectors, and the layer that scores on top of a decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fwk.errors import BlameSequence, ConfigError
from fwk.interfaces.feature import LoadedModel, ModelBuild, WorkerPart, WorkerPartContext
from fwk.interfaces.model import Encoder, Model, ModelContext
from fwk.interfaces.pooling import PoolingConfig
from fwk.types import Batch, ForwardBatch, NewSequence
from fwk_features.pooling import Pooling, PoolingOptions, Vector, Wanted
from fwk_layers import ReplicatedLinear


@dataclass(frozen=True, slots=True)
class _Pooled:
    """vectors: [num_vectors, size] on the host, of the sequences in ``slots``, which have ``counts`` each."""

    slots: list[int]
    counts: list[int]
    vectors: Tensor


class PoolingWorker(WorkerPart):
    """Has a part in every step of a model that does not generate, and in none of another."""

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._options: PoolingOptions = context.options
        self._pooling: Pooling | None = None if context.prompts is None else context.prompts.settings
        self._num_labels = 0 if context.prompts is None else len(context.prompts.labels)
        self._starts: dict[int, int] = {}
        self._model: Model | Encoder | None = None
        self._score: ReplicatedLinear | None = None
        self._token_ids = torch.empty(0, dtype=torch.int64)

    def model_context(self, context: ModelContext, build: ModelBuild) -> str:
        """Without tokens to score by, no logits are wanted: the checkpoint's ``score`` layer is read, or nothing."""
        pooling = self._pooling
        if pooling is None or not pooling.is_decoder or build.role != "served":
            return ""
        if self._options.classifier_from_token:
            return ""
        if pooling.has_labels:  # as in transformers' ``XForSequenceClassification``
            size = context.config.hidden_size
            context.made[self.context.name] = ReplicatedLinear(
                context, "score", size, self._num_labels, method=context.plain
            )
        context.config = replace(context.config, tie_word_embeddings=True)  # there may be no head: a tied one is free
        return ""

    def model_loaded(self, loaded: LoadedModel) -> None:
        self._model, self._score = loaded.model, loaded.made.get(self.context.name)
        if self._pooling is not None and self._pooling.has_labels and self._options.classifier_from_token:
            ids = [self._token_id(word) for word in self._options.classifier_from_token]
            self._token_ids = torch.tensor(ids, device=self.context.device, dtype=torch.int64)

    def _token_id(self, word: str) -> int:
        ids = self.context.encode(word)
        if len(ids) != 1:
            raise ConfigError(f"--classifier-from-token: {word!r} is {len(ids)} tokens of this model, not one")
        return ids[0]

    def rehearsal(self) -> Sequence[Wanted]:
        return () if self._pooling is None else (Wanted(),)

    def begin(self, new: NewSequence, asked: Wanted) -> None:
        self._starts[new.slot] = asked.segment_start

    def forget(self, slot: int) -> None:
        self._starts.pop(slot, None)

    def inputs(self, batch: Batch, forward: ForwardBatch) -> None:
        forward.extras["segment_start"] = [self._starts.get(s.slot, 0) for s in batch.sequences]

    def computed(self, batch: Batch, forward: ForwardBatch, hidden: Tensor, logits: Tensor | None) -> _Pooled | None:
        ended = [(i, s.slot) for i, s in enumerate(batch.sequences) if s.samples]
        if self._pooling is None or not ended:
            return None
        found = self._scores(hidden, forward) if isinstance(self._model, Model) else None
        if isinstance(self._model, Encoder):
            found = self._model.pool(hidden, forward)
        if found is None:
            found = pool(hidden, forward, self._pooling.config)
        slots = [slot for _, slot in ended]
        if isinstance(found, Tensor) and found.dim() == 2 and len(found) == len(ended):
            return _Pooled(slots, [1] * len(ended), self.context.to_host(found.float()))
        own = [found[i].reshape(-1, found[i].shape[-1]) for i, _ in ended]
        return _Pooled(slots, [len(x) for x in own], self.context.to_host(torch.cat(own).float()))

    def _scores(self, hidden: Tensor, batch: ForwardBatch) -> Tensor | None:
        """A decoder's scores [num_seqs, num_labels], of the last hidden state; None without labels."""
        assert self._pooling is not None
        if not self._pooling.has_labels:
            return None
        last = hidden.index_select(0, batch.query_start[1:].long() - 1)
        if self._score is not None:
            return self._score(last).float()
        assert isinstance(self._model, Model)
        logits = self._model.logits(last).float().index_select(1, self._token_ids)
        return logits[:, -1:] - logits[:, :1] if logits.shape[1] == 2 else logits

    def results(self, made: _Pooled) -> Mapping[int, Vector | BlameSequence]:
        vectors = made.vectors.numpy().astype("<f4", copy=False)
        ends = np.cumsum(made.counts).tolist()
        is_finite = bool(np.isfinite(vectors).all())
        found: dict[int, Vector | BlameSequence] = {}
        for slot, start, end in zip(made.slots, [0, *ends[:-1]], ends, strict=True):
            own = vectors[start:end]
            found[slot] = Vector(own.tobytes())
            if not (is_finite or np.isfinite(own).all()):
                found[slot] = BlameSequence(slot, "the embedding is not made of finite numbers")
        return found


def pool(hidden: Tensor, batch: ForwardBatch, pooling: PoolingConfig) -> Tensor | Sequence[Tensor]:
    """Hidden states [num_tokens, hidden_size] to vectors [num_seqs, hidden_size] in float32.

    With pooling ``token``, to a tensor [num_tokens_of_it, hidden_size] for each sequence. A sequence's vectors depend
    on its own tokens alone; a mean is summed in their order.
    """
    starts, ends = batch.query_start[:-1].long(), batch.query_start[1:].long()
    if pooling.kind == "token":
        vectors = F.normalize(hidden.float(), dim=-1) if pooling.normalize else hidden.float()
        return vectors.split([end - start for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])
    if pooling.kind == "cls":
        vectors = hidden.index_select(0, starts).float()
    elif pooling.kind == "last":
        vectors = hidden.index_select(0, ends - 1).float()
    else:
        lengths = ends - starts
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=hidden.device), lengths)
        sums = torch.zeros((len(lengths), hidden.shape[1]), dtype=torch.float32, device=hidden.device)
        vectors = sums.index_add_(0, owner, hidden.float()) / lengths[:, None]
    return F.normalize(vectors, dim=-1) if pooling.normalize else vectors
