"""Token embedding and the head that turns hidden states into logits, sharded over the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from fwk.errors import ConfigError, PluginFault, in_range
from fwk.interfaces.quant import PLAIN, LayerFormat, LayerKind, LinearShape, QuantMethod, Weights
from fwk.interfaces.weights_cache import PackedTensors
from fwk_layers.linear import fitting
from fwk_layers.sharding import PaddedRows, Part, load

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class VocabEmbedding:
    """Token ids to hidden states. The last rank's rows are padded with zeros.

    ``matrix`` holds this rank's rows, [num_rows, hidden_size]; None where they stay packed (``form``, ``weights``).
    scale: factor on the hidden states, rounded to the model's dtype. Of stages but the first nothing is read, unless a
    tied head asks for it (``load``).
    """

    def __init__(self, context: ModelContext, prefix: str, *, scale: float | None = None) -> None:
        config = context.config
        self.operators = context.operators
        self.scale = None if scale is None else torch.tensor(scale, dtype=context.dtype).item()
        self.tp, self.prefix = context.tp, prefix
        self.vocab_size = config.vocab_size
        self.rows = PaddedRows.of(config.vocab_size, context.tp)
        self.form = context.quant.choose(prefix, LayerKind.EMBEDDING)
        self.matrix: Tensor | None = None
        self.weights: Weights = None
        if context.tp.stage.is_first:
            self.load(context)

    def load(self, context: ModelContext) -> None:
        """Read its weights."""
        if self.form.layout == PLAIN:
            self._find_matrix(context)
        else:
            parts = [(Part(self.prefix, self.vocab_size), self.rows)]
            self.weights = load(context, self.form, parts, context.config.hidden_size)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 to [num_tokens, hidden_size]."""
        if self.tp.size == 1:
            return self._look_up(token_ids)
        local = token_ids - self.rows.first
        is_other = (local < 0) | (local >= self.rows.num_rows)
        hidden = self._look_up(local.masked_fill(is_other, 0))
        return self.tp.all_reduce(hidden.masked_fill_(is_other.unsqueeze(-1), 0))

    def read(self, context: ModelContext) -> Tensor:
        """``matrix``, from the checkpoint where it is not here: an earlier start had no need of it."""
        if self.matrix is None:
            name, size = f"{self.prefix}.weight", (self.vocab_size, context.config.hidden_size)
            if context.device.type == "cpu":
                whole = context.weights.tensor_as(name, size, context.dtype)
                self.matrix = self.rows.cut(whole, 0, 1, name).contiguous()
            elif self.rows.is_whole(self.vocab_size):
                self.matrix = context.weights.tensor_on(name, size, context.device).to(context.dtype).contiguous()
            else:
                mine = self.rows.cut(context.weights.tensor(name, size), 0, 1, name)
                self.matrix = mine.to(context.device).to(context.dtype).contiguous()
        return self.matrix

    def _find_matrix(self, context: ModelContext) -> None:
        """``matrix``, or nothing where the weights of a tied head were kept, which serve."""
        method, name = self.form.method, f"{self.prefix}.weight"
        size = (self.vocab_size, context.config.hidden_size)
        key = repr(("embedding", method.packed_version, name, str(context.dtype), self.rows, size))
        found = context.weights_cache.find(key)
        if found is not None:
            self.matrix = found.tensors.get("matrix")
            return
        self.read(context)
        is_mapped = context.weights.is_mapped(name, context.dtype)

        def make() -> PackedTensors | None:
            if self.matrix is None:
                return PackedTensors({})
            return None if is_mapped else PackedTensors({"matrix": self.matrix})

        context.weights_cache.store(key, make)

    def share(self, weights: Weights) -> None:
        """Look rows up in a tied head's weights from now on, where its method can, and let go of ``matrix``."""
        if self.form.method.can_embed:
            self.matrix, self.weights = None, weights

    def _look_up(self, rows: Tensor) -> Tensor:
        why = in_range(rows, self.vocab_size, "the token")
        if why is not None:  # kernels read wherever it is
            raise PluginFault(why)
        if self.matrix is not None:
            return self.operators.rows(self.matrix, rows, self.scale)
        found = self.form.method.rows(self.weights, rows)
        if self.scale is not None:
            self.operators.scale(found, self.scale)
        return found


class LMHead:
    """Hidden states to logits. Tied to ``embedding`` they share one copy of the numbers.

    It is two where another format was chosen, or the head's method cannot look rows up in its layout.
    is_final: nothing is done to what it returns before tokens are chosen, so that greedy steps may leave out all but
    the largest (``QuantMethod.lm_head``, which makes ``head_weights``). Of stages but the last there is none.
    """

    def __init__(
        self, context: ModelContext, prefix: str, embedding: VocabEmbedding | None = None, *, is_final: bool = False
    ) -> None:
        config = context.config
        self.tp, self.vocab_size = context.tp, config.vocab_size
        if not context.tp.stage.is_last:
            return
        self._width = PaddedRows.of(config.vocab_size, context.tp).num_rows
        embedding = None if embedding is not None and _is_another(context, prefix, embedding) else embedding
        if embedding is not None and not context.tp.stage.is_first:
            embedding.load(context)
        stored = prefix if embedding is None else embedding.prefix
        form = context.quant.choose(prefix, stored=stored)
        self.is_float32 = context.float32_head is not None
        if context.float32_head is not None:
            form, context = _in_float32(context, context.float32_head, prefix, stored)
        self.method = form.method
        self.weights: Weights = None
        if embedding is None or form != embedding.form:
            rows = PaddedRows.of(config.vocab_size, self.tp)
            self.weights = load(context, form, [(Part(stored, config.vocab_size), rows)], config.hidden_size)
        elif embedding.form.layout == PLAIN:
            self.weights = _tied_weights(context, form.method, embedding)
            embedding.share(self.weights)
        else:
            self.weights = embedding.weights
        self.head_weights = self.weights
        if (
            is_final and not self.is_float32 and context.is_greedy is not None and self.tp.size == 1
        ):  # padding might be the largest of a rank
            self.head_weights = self.method.lm_head(self.weights, context.is_greedy)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size], the same on all ranks."""
        hidden = hidden.float() if self.is_float32 else hidden
        own = fitting(self.method.apply(self.head_weights, hidden, None), hidden, self._width, self.method)
        logits = self.tp.all_gather(own, -1)
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]


def _is_another(context: ModelContext, prefix: str, embedding: VocabEmbedding) -> bool:
    """Whether the checkpoint has a head with other numbers than the embedding that the config takes it for."""
    prefixes, weights = (prefix, embedding.prefix), context.weights
    if f"{prefix}.weight" not in weights.names() or not all(PLAIN in weights.layouts(name) for name in prefixes):
        return False
    size = (embedding.vocab_size, context.config.hidden_size)
    return not torch.equal(*(weights.tensor(f"{name}.weight", size) for name in prefixes))


def _tied_weights(context: ModelContext, method: QuantMethod, embedding: VocabEmbedding) -> Weights:
    """``finish``'s weights of the embedding's matrix."""
    rows, hidden, version = embedding.rows, context.config.hidden_size, method.packed_version
    key = repr(("tied", version, embedding.prefix, str(context.dtype), rows, embedding.vocab_size, hidden))
    found = None if version is None else context.weights_cache.find(key)
    if found is not None:
        return method.from_packed(found)
    shape = LinearShape(hidden, (rows.num_rows,), context.dtype, context.device, embedding.prefix)
    weights = method.finish({"weight": embedding.read(context)}, shape)
    context.weights.release([f"{embedding.prefix}.weight"])
    if version is not None:
        context.weights_cache.store_at_once(key, partial(method.to_packed, weights))
    return weights


def _in_float32(
    context: ModelContext, method: QuantMethod, prefix: str, stored: str
) -> tuple[LayerFormat, ModelContext]:
    """The format and the context of a head that is computed in float32. Raises ``ConfigError`` for a packed one."""
    offered = context.weights.layouts(stored)
    if PLAIN not in offered:
        raise ConfigError(
            f"--enable-fp32-lm-head: {prefix} is stored as {' and '.join(offered)}, which cannot be read as numbers"
        )
    return LayerFormat(method, PLAIN), replace(context, dtype=torch.float32)
