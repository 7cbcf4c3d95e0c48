"""BART."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk.interfaces.model import EncoderInput
from fwk.types import ModelConfig


class BartSpec(ModelSpec):
    """The decoder may begin with a second token that the checkpoint forces."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        heads = raw.get("decoder_attention_heads"), raw.get("encoder_attention_heads")
        if heads[0] != heads[1]:
            raise ModelLoadError(
                f"config.json: 'decoder_attention_heads' is {heads[0]} and 'encoder_attention_heads' {heads[1]}; "
                "bart computes as many in both"
            )
        names = {
            "num_hidden_layers": raw.get("decoder_layers"),
            "num_attention_heads": heads[0],
            "intermediate_size": raw.get("decoder_ffn_dim"),
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        }
        return {**raw, **{name: value for name, value in names.items() if value is not None}}

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
            features=frozenset({"cross_attention"}),
            summary="An encoder and a decoder with learned positions, norms behind each sum.",
        ),
    ]
