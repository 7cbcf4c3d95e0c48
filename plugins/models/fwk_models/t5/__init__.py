"""T5 and Flan-T5."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk.interfaces.model import EncoderInput
from fwk.types import ModelConfig


class T5Spec(ModelSpec):
    """Positions are distances: how long a text may be is not the model's affair."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        names = {
            "num_hidden_layers": raw.get("num_decoder_layers") or raw.get("num_layers"),
            "num_attention_heads": raw.get("num_heads"),
            "head_dim": raw.get("d_kv"),
            "intermediate_size": raw.get("d_ff"),
            "rms_norm_eps": raw.get("layer_norm_epsilon"),
            "max_position_embeddings": raw.get("n_positions") or 512,
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        }
        return {**raw, **{name: value for name, value in names.items() if value is not None}}

    def encoder_input(self, config: ModelConfig) -> EncoderInput:
        start = config.raw.get("decoder_start_token_id")
        start = config.raw.get("pad_token_id") if start is None else start
        if not isinstance(start, int):
            raise ModelLoadError("config.json: 'decoder_start_token_id' must say which token the decoder begins with")
        return EncoderInput((start,))


@hookimpl
def models() -> list[ModelSpec]:
    return [
        T5Spec(
            name="t5",
            load="fwk_models.t5.model:T5",
            architectures=("T5ForConditionalGeneration",),
            features=frozenset({"cross_attention", "distance_bias"}),
            summary="An encoder and a decoder with biases by distance: T5, T5 1.1, Flan-T5.",
        ),
    ]
