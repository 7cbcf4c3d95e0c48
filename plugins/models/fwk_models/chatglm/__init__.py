"""ChatGLM 2, 3 and the first GLM-4, as they were published before transformers knew them."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError

_NAMES = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
    "vocab_size": "padded_vocab_size",
    "max_position_embeddings": "seq_length",
}


class ChatGLMSpec(ModelSpec):
    """Its config has names of its own for nearly all fields."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        if not raw.get("rmsnorm", True) or raw.get("post_layer_norm") is False or raw.get("prefix_projection"):
            raise ModelLoadError(
                "config.json: chatglm without rmsnorm or post_layer_norm, or with a prefix, is not known"
            )
        found = {ours: raw[theirs] for ours, theirs in _NAMES.items() if theirs in raw}
        heads = raw.get("num_attention_heads")
        found["num_key_value_heads"] = (
            raw.get("multi_query_group_num", 1) if raw.get("multi_query_attention") else heads
        )
        return {
            **raw,
            **found,
            "rope_theta": 10_000.0 * float(raw.get("rope_ratio", 1.0)),
            "partial_rotary_factor": 0.5,
        }


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ChatGLMSpec(
            name="chatglm",
            load="fwk_models.chatglm.model:ChatGLM",
            architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
            summary="GLM with Q, K and V in one matrix, gate and up in another; neighbours of half a head turn.",
        )
    ]
