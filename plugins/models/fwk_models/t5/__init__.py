"""T5 and Flan-T5."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk.interfaces.model import EncoderInput
from fwk.types import ModelConfig
from fwk_models._common.config import Config, ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {
        "vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "relu", "pad_token_id": 0, "eos_token_id": 1,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class T5Spec(ConfiguredSpec):
    """Positions are distances: how long a text may be is not the model's affair."""

    def derived(self, config: Config, architecture: str) -> Config:
        scales = config.get("tie_word_embeddings") is not False
        names = {
            "hidden_size": config["d_model"],
            "num_hidden_layers": config.get("num_decoder_layers") or config["num_layers"],
            "num_attention_heads": config["num_heads"],
            "head_dim": config["d_kv"],
            "intermediate_size": config["d_ff"],
            "rms_norm_eps": config["layer_norm_epsilon"],
            "max_position_embeddings": config.get("n_positions") or 512,
            "tie_word_embeddings": True,  # a head of its own counts where there is one
            "scale_decoder_outputs": config.get("scale_decoder_outputs", scales),
        }
        return {**config, **names}

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
            defaults=DEFAULTS,
            names={
                "d_model": ("hidden_size", "d_model"),
                "num_layers": ("num_hidden_layers", "num_layers"),
                "num_heads": ("num_attention_heads", "num_heads"),
                "d_kv": ("head_dim", "d_kv"),
            },
            features=frozenset({"cross_attention", "distance_bias"}),
            summary="An encoder and a decoder with biases by distance: T5, T5 1.1, Flan-T5.",
        ),
    ]
