"""BART."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk.interfaces.model import EncoderInput
from fwk.types import ModelConfig
from fwk_models._common.config import Config, ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": {
        "vocab_size": 50_265, "max_position_embeddings": 1024, "encoder_layers": 12, "encoder_ffn_dim": 4096,
        "encoder_attention_heads": 16, "decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16,
        "activation_function": "gelu", "d_model": 1024, "scale_embedding": False, "eos_token_id": 2,
        "decoder_start_token_id": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class BartSpec(ConfiguredSpec):
    """The decoder may begin with a second token that the checkpoint forces."""

    def derived(self, config: Config, architecture: str) -> Config:
        heads = config.get("decoder_attention_heads"), config.get("encoder_attention_heads")
        if heads[0] != heads[1]:
            raise ModelLoadError(
                f"config.json: 'decoder_attention_heads' is {heads[0]} and 'encoder_attention_heads' {heads[1]}; "
                "bart computes as many in both"
            )
        names = {
            "hidden_size": config["d_model"],
            "num_hidden_layers": config["decoder_layers"],
            "num_attention_heads": heads[0],
            "intermediate_size": config["decoder_ffn_dim"],
        }
        return {**config, **names}

    def encoder_input(self, config: ModelConfig) -> EncoderInput:
        start, forced = (config.raw.get(name) for name in ("decoder_start_token_id", "forced_bos_token_id"))
        if not isinstance(start, int):
            raise ModelLoadError("config.json: 'decoder_start_token_id' must say which token the decoder begins with")
        return EncoderInput((start, forced) if isinstance(forced, int) else (start,))


@hookimpl
def models() -> list[ModelSpec]:
    return [
        BartSpec(
            name="bart",
            load="fwk_models.bart.model:Bart",
            architectures=("BartForConditionalGeneration",),
            defaults=DEFAULTS,
            names={"d_model": ("hidden_size", "d_model")},
            features=frozenset({"cross_attention"}),
            summary="An encoder and a decoder with learned positions, norms behind each sum.",
        ),
    ]
