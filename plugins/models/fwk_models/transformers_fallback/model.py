"""transformers' own classes on fwk's attention, linear layers and weights.

A step's tokens are given as one flat sequence with their positions, and no cache of transformers is used: the attention
function registered with transformers hands Q, K and V to fwk's backend, which knows whose token is whose. That is sound
only where nothing but attention looks from one token at another, and positions come from ``position_ids`` alone; both
are tried out on the loaded model (``trial``), because no declaration of transformers says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, initialization
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fwk.errors import FwkError, ModelLoadError
from fwk.interfaces.model import Model, ModelContext
from fwk_models.transformers_fallback.paging import NAME, PagedAttention
from fwk_models.transformers_fallback.trial import check_flattening
from fwk_models.transformers_fallback.weights import load_weights

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch, ModelConfig


class TransformersModel(Model):
    """Token ids to hidden states to logits, as transformers computes them."""

    def __init__(self, context: ModelContext) -> None:
        if context.tp.size > 1:
            raise ModelLoadError(
                "models that run through transformers cannot be split: set --tensor-parallel-size 1, or choose "
                "another --model-impl if one serves this architecture"
            )
        config = read_config(context.config)
        check_ropes(context, config)
        causal = build(config, context.dtype)
        self.attention = PagedAttention(context, causal)
        load_weights(context, causal)
        causal.eval().to(context.device)
        self.body, self.causal = causal.base_model, causal
        if self.body is causal:
            raise ModelLoadError(f"transformers' {type(causal).__name__} has no body apart from its head")
        if getattr(causal, "_is_stateful", False):
            raise ModelLoadError(f"transformers' {type(causal).__name__} keeps a state besides K/V, which has no cache")
        setattr(causal, causal.base_model_prefix, HeadOnly())
        try:
            check_flattening(self, context)
        except FwkError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"transformers' {type(causal).__name__} does not run with paged attention: "
                f"{type(error).__name__}: {error}"
            ) from error

    def forward(self, batch: ForwardBatch) -> Tensor:
        with self.attention.on(batch):
            return self.run(batch.token_ids, batch.positions)

    def run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] each to hidden states [num_tokens, hidden_size]."""
        return self.body(token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)[0][0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.causal(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]


class HeadOnly(nn.Module):
    """Stands where the body was: what goes in comes out, so that calling the model applies its head alone."""

    @property
    def decoder(self) -> HeadOnly:
        """Bodies around a decoder are called by it (OPT)."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BodyOutput:
        return BodyOutput(inputs_embeds)


class BodyOutput:
    """What a body returns, as far as heads look at it."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None  # caches, attentions, router logits: none


def build(config: Any, dtype: torch.dtype) -> Any:
    """The model with weights that are still any numbers, its buffers as they should be."""
    try:
        with initialization.no_init_weights():
            causal = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    except Exception as error:  # of many kinds: each model class checks itself
        if NAME in str(error):
            raise ModelLoadError(
                f"transformers' model for {type(config).__name__} has attention of its own, which cannot be replaced"
            ) from error
        raise ModelLoadError(
            f"transformers cannot build {type(config).__name__} for paged attention: {type(error).__name__}: {error}"
        ) from error
    causal.tie_weights()  # left out with the rest of the initialisation
    return causal


def read_config(config: ModelConfig) -> Any:
    """transformers' config object. Code that a checkpoint brings with it is never run."""
    wanted = config.architecture
    types = [kind for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if wanted in names_of(names)]
    if not types:
        raise ModelLoadError(
            f"no model plugin serves {wanted!r} with these options ('fwk plugins why models --model MODEL --with ...' "
            f"says why), and transformers {transformers.__version__} has no causal language model of that name"
        )
    given = str(config.raw.get("model_type"))
    kind = given if given in types else types[0]
    settings = {name: value for name, value in config.raw.items() if name not in ("auto_map", "model_type", "dtype")}
    settings.pop("quantization_config", None)  # the linear layers' affair, and they are fwk's
    try:
        made = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # of many kinds: each config class checks itself
        first = " ".join(str(error).split())
        raise ModelLoadError(f"transformers does not accept the config of {wanted}: {first}") from error
    if made.sub_configs:
        raise ModelLoadError(f"{wanted} is made of several models ({', '.join(made.sub_configs)}); only text is served")
    return made


def names_of(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def check_ropes(context: ModelContext, config: Any) -> None:
    """Angles that change when the longest sequence of a batch grows would tie its sequences to each other."""
    for rope in {id(rope): rope for rope in (context.config.rope, *context.config.ropes.values())}.values():
        original = int(
            rope.scaling.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or context.config.max_position_embeddings
        )
        if rope.kind in ("dynamic", "longrope") and context.max_model_len > original:
            raise ModelLoadError(
                f"rope scaling {rope.kind!r} changes with a batch's longest sequence: set --context-length {original}"
            )
