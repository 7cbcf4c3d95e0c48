"""Whisper (Radford et al. 2022, arXiv:2212.04356), Distil-Whisper and their like."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk.interfaces.model import EncoderInput
from fwk.types import ModelConfig
from fwk_models._common.config import Config, ConfiguredSpec, number_of

DEFAULTS: dict[str, dict[str, Any]] = {
    "WhisperForConditionalGeneration": {
        "vocab_size": 51_865, "num_mel_bins": 80, "encoder_layers": 4, "encoder_attention_heads": 6,
        "decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536, "encoder_ffn_dim": 1536,
        "activation_function": "gelu", "d_model": 384, "scale_embedding": False, "max_source_positions": 1500,
        "max_target_positions": 448, "decoder_start_token_id": 50_257, "pad_token_id": 50_256, "eos_token_id": 50_256,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What transformers' configuration class has where a file says nothing."""


class WhisperSpec(ConfiguredSpec):
    """A prompt is a window of sound, as many tokens as the encoder makes rows, and what the decoder begins with."""

    def derived(self, config: Config, architecture: str) -> Config:
        names = {
            "hidden_size": config["d_model"],
            "num_hidden_layers": config["decoder_layers"],
            "num_attention_heads": config["decoder_attention_heads"],
            "intermediate_size": config["decoder_ffn_dim"],
            "max_position_embeddings": number_of(config, "max_source_positions", 1, 2**14)
            + number_of(config, "max_target_positions", 2, 2**14),
            "is_encoder_decoder": True,
            "followed_generation_fields": ["suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids"],
        }
        return {**config, **names}

    def encoder_input(self, config: ModelConfig) -> EncoderInput:
        count = config.raw.get("max_source_positions")
        if not isinstance(count, int):
            raise ModelLoadError("config.json: 'max_source_positions' must say how many rows a window of sound has")
        return EncoderInput(num_tokens=count)


@hookimpl
def models() -> list[ModelSpec]:
    return [
        WhisperSpec(
            name="whisper",
            load="fwk_models.whisper.model:Whisper",
            architectures=("WhisperForConditionalGeneration",),
            defaults=DEFAULTS,
            names={"d_model": ("hidden_size", "d_model")},
            only={"scale_embedding": (False,)},
            media=frozenset({"audio"}),
            features=frozenset({"cross_attention"}),
            summary="An encoder of sound and a decoder that writes what is said: Whisper, Distil-Whisper.",
        ),
    ]
