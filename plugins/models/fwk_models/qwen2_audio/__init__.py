"""Qwen2-Audio (Chu et al. 2024, arXiv:2407.10759): Qwen2 that hears through Whisper's encoder."""

from collections.abc import Mapping
from typing import Any, cast

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.config import Config, ConfiguredSpec, with_later_windows, with_rope

TEXT: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
EARS: dict[str, Any] = {
    "d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layers": 32,
    "num_mel_bins": 128, "max_source_positions": 1500, "scale_embedding": False, "activation_function": "gelu",
}  # fmt: skip
"""What transformers' classes have where a file says nothing."""


class Qwen2AudioSpec(ConfiguredSpec):
    """``ModelSpec`` for a config whose text model's is nested."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        text, audio = raw.get("text_config"), raw.get("audio_config")
        if not isinstance(text, Mapping) or not isinstance(audio, Mapping):
            raise ModelLoadError("config.json: 'text_config' and 'audio_config' must be objects")
        kind = cast("Mapping[str, Any]", text).get("model_type", "qwen2")
        if kind != "qwen2":
            raise ModelLoadError(f"config.json: text_config's 'model_type' is {kind!r}; qwen2_audio computes 'qwen2'")
        outer = {key: raw[key] for key in ("architectures", "eos_token_id", "dtype") if raw.get(key) is not None}
        return super().normalised({**raw, **text, "audio_config": {**EARS, **audio}, **outer})

    def derived(self, config: Config, architecture: str) -> Config:
        return {**with_rope(with_later_windows(config)), "text_kind": "qwen2", "tie_word_embeddings": False}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Qwen2AudioSpec(
            name="qwen2_audio",
            load="fwk_models.qwen2_audio.model:Qwen2Audio",
            architectures=("Qwen2AudioForConditionalGeneration",),
            defaults={"Qwen2AudioForConditionalGeneration": TEXT},
            optional=frozenset({"layer_types"}),
            media=frozenset({"audio"}),
            summary="Qwen2's decoder and Whisper's encoder of sounds, whose rows are joined in pairs and projected.",
        )
    ]
