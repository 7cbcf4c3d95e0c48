"""Gemma 3: local and global layers, norms before and after each block, scaled embeddings; images by SigLIP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.model import Model, ModelContext
from fwk_layers import (
    Border,
    GatedMLP,
    HiddenTap,
    LMHead,
    OffsetRMSNorm,
    RotaryEmbedding,
    RotaryRows,
    SelectTokens,
    VocabEmbedding,
    insert,
)
from fwk_models._common.attention import NormedAttention
from fwk_models._common.siglip import SiglipEncoder
from fwk_models._common.vision import Sizes, whole

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class Gemma3(Model):
    """Token ids to hidden states to logits. ``root``: what names of its weights begin with, but for ``head_name``."""

    prunes_last_layer = True
    divides_layers = True
    root: str = "model"
    head_name: str = "lm_head"

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        if raw.get("use_bidirectional_attention"):
            raise ModelLoadError("this Gemma 3 attends in both directions: it embeds text and generates none")
        self.border = Border(context)
        self.embedding = VocabEmbedding(context, f"{self.root}.embed_tokens", scale=config.hidden_size**0.5)
        kinds = sorted({config.layer_type(index) for index in range(config.num_layers)})
        self.rotary = {kind: RotaryEmbedding(context, rope=config.rope_of(kind)) for kind in kinds}
        self.layers = [Gemma3Layer(context, self.rotary, index, self.root) for index in context.layers]
        self.norm = OffsetRMSNorm(context, f"{self.root}.norm", config.hidden_size, config.rms_norm_eps)
        self.soft_cap: float | None = raw.get("final_logit_softcapping")
        tied = self.embedding if raw.get("tie_word_embeddings", True) else None
        self.head = LMHead(context, self.head_name, tied, is_final=self.soft_cap is None)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.border.enter(batch)
        if x is None:
            x = insert(self.embedding(batch.token_ids), batch)
        rows = {kind: rotary.rows(batch.positions) for kind, rotary in self.rotary.items()}
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, rows[layer.kind], batch)
        return self.norm.add(x, residual)[0] if self.border.is_last else self.border.leave(x, residual)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


class Gemma3Layer:
    """Attention and MLP, each between two norms."""

    def __init__(self, context: ModelContext, rotary: dict[str, RotaryEmbedding], index: int, root: str) -> None:
        config, raw, prefix = context.config, context.config.raw, f"{root}.layers.{index}"

        def norm(name: str) -> OffsetRMSNorm:
            return OffsetRMSNorm(context, f"{prefix}.{name}", config.hidden_size, config.rms_norm_eps)

        self.kind = config.layer_type(index)
        self.input_norm = norm("input_layernorm")
        self.attention = NormedAttention(
            context,
            rotary[self.kind],
            f"{prefix}.self_attn",
            index,
            norm=OffsetRMSNorm,
            bias=bool(raw.get("attention_bias", False)),
            scale=float(raw.get("query_pre_attn_scalar") or 256) ** -0.5,
            soft_cap=raw.get("attn_logit_softcapping"),
        )
        self.tap, self.wanted = HiddenTap(context, index), SelectTokens(context, index)
        self.attention_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp = GatedMLP(context, f"{prefix}.mlp", activation=raw.get("hidden_activation") or "gelu_pytorch_tanh")
        self.output_norm = norm("post_feedforward_layernorm")
        self.input_norm.feed(self.attention)
        self.mlp_norm.feed(self.mlp)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: RotaryRows, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x and the residual stream it is still to be added to: [num_tokens, hidden_size] each (last layer: fewer)."""
        self.tap.change(x)
        x, residual = self.input_norm.add(x, residual)
        self.tap(residual)
        x = self.attention_norm(self.attention(x, rows, batch))
        x, residual = self.mlp_norm.add(x, self.wanted(residual, batch))
        return self.output_norm(self.mlp(x)), residual


class SeeingGemma3(Gemma3):
    """The same, and rows of images, whose tokens see each other (``MEDIA_SPAN``)."""

    def __init__(self, context: ModelContext) -> None:
        is_old = context.weights.has("language_model.model.embed_tokens.weight")
        self.root = "language_model.model" if is_old else "model.language_model"
        self.head_name = "language_model.lm_head" if is_old else "lm_head"
        super().__init__(context)
        outer = "" if is_old else "model."
        self.images = ImageEncoder(context, outer) if context.encodes("image") else None
        self.most = 1 if context.is_deterministic else MAX_IMAGES
        if self.images is None:
            for name in context.weights.names():
                if name.startswith((f"{outer}vision_tower.", f"{outer}multi_modal_projector.")):
                    context.weights.skip(name)

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of images, ``pixel_values`` [3, size, size] each: [tokens of an image, hidden_size]."""
        assert kind == "image"
        assert self.images is not None, "the run takes no images"
        images = [item["pixel_values"] for item in items]
        batches = [torch.stack(images[i : i + self.most]) for i in range(0, len(images), self.most)]
        return [rows for batch in batches for rows in self.images(batch)]


MAX_IMAGES = 8
"""Images encoded at once. One, where numbers may not depend on others."""


class ImageEncoder:
    """SigLIP's rows, the mean of each square of them, normalised and projected."""

    def __init__(self, context: ModelContext, outer: str) -> None:
        """outer: what names begin with."""
        context = whole(context)
        raw, sizes, projector = context.config.raw, Sizes(context.config.raw), f"{outer}multi_modal_projector"
        side = round(int(raw["mm_tokens_per_image"]) ** 0.5)
        self.per_side, self.pool = sizes.per_side, sizes.per_side // side
        if side * self.pool != self.per_side or side**2 != raw["mm_tokens_per_image"]:
            raise ModelLoadError(
                f"config.json: {self.per_side} x {self.per_side} patches of an image are not squares of which "
                f"'mm_tokens_per_image', {raw['mm_tokens_per_image']}, cover it"
            )
        self.tower = SiglipEncoder(context, f"{outer}vision_tower", sizes, sizes.num_layers, has_norm=True)
        self.norm = OffsetRMSNorm(context, f"{projector}.mm_soft_emb_norm", sizes.hidden, sizes.eps)
        shape = (sizes.hidden, context.config.hidden_size)
        weight = context.weights.tensor(f"{projector}.mm_input_projection_weight", shape)
        self.projection = weight.to(context.device, context.dtype)

    def __call__(self, images: Tensor) -> Tensor:
        """[num_images, channels, size, size] to [num_images, tokens of an image, hidden_size of the decoder]."""
        x = self.tower(images).transpose(1, 2).unflatten(2, (self.per_side, self.per_side))
        x = F.avg_pool2d(x, self.pool).flatten(2).transpose(1, 2)
        return self.norm(x.reshape(-1, x.shape[-1])).matmul(self.projection).view(len(x), x.shape[1], -1)
