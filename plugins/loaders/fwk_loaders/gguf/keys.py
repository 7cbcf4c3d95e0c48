"""Keys of a GGUF file that nothing reads: known to be harmless, or at a value that changes nothing, or refused."""

from __future__ import annotations

from typing import Any

from fwk.errors import ModelLoadError
from fwk_loaders.gguf.metadata import Metadata
from fwk_loaders.gguf.reader import StoredArray

HARMLESS = frozenset({
    ".vocab_size", ".tensor_data_layout", ".embedding_length_out", ".features_length",
    ".expert_shared_count", ".expert_feed_forward_length", ".expert_shared_feed_forward_length", ".expert_used_count",
    ".expert_chunk_feed_forward_length", ".interleave_moe_layer_step", ".full_attention_interval",
    ".rope.dimension_sections", ".rope.dimension_count", ".rope.scaling.finetuned",
    ".rope.scaling.original_context_length", ".rope.scaling.factor", ".classifier.output_labels",
    ".attention.key_length", ".attention.value_length",
})  # fmt: skip
"""The tensors' shapes say the same; angles that are not stretched have no length or factor; texts have one position."""

ONLY: dict[str, tuple[Any, ...]] = {
    ".attention.causal": (True,),
    ".attention.clamp_kqv": (0.0,),
    ".attention.group_norm_epsilon": (0.0,),
    ".attention.group_norm_groups": (0,),
    ".attention.max_alibi_bias": (0.0,),
    ".attention.q_lora_rank": (0,),
    ".attention.kv_lora_rank": (0,),
    ".attention.scale": (0.0,),
    ".attention.shared_kv_layers": (0,),
    ".attention.sliding_window": (0,),
    ".attn_logit_softcapping": (0.0,),
    ".embedding_scale": (0.0, 1.0),
    ".expert_gating_func": (0, 1),
    ".expert_group_count": (0, 1),
    ".expert_group_scale": (0.0, 1.0),
    ".expert_group_used_count": (0, 1),
    ".expert_weights_scale": (0.0, 1.0),
    ".final_logit_softcapping": (0.0,),
    ".leading_dense_block_count": (0,),
    ".logit_scale": (0.0, 1.0),
    ".moe_every_n_layers": (0, 1),
    ".moe_latent_size": (0,),
    ".n_deepstack_layers": (0,),
    ".pooling_type": (0, 3),  # none, or the last token's, which is what decoders do here
    ".residual_scale": (0.0, 1.0),
    ".rope.scale_linear": (1.0,),
    ".rope.scaling.alpha": (0.0, 1.0),
    ".rope.scaling.attn_factor": (1.0,),
    ".rope.scaling.yarn_attn_factor": (1.0,),
    ".rope.scaling.yarn_beta_fast": (32.0,),
    ".rope.scaling.yarn_beta_slow": (1.0,),
    ".rope.scaling.yarn_ext_factor": (1.0, -1.0),
    ".rope.scaling.yarn_log_multiplier": (0.0,),
    ".router_logit_softcapping": (0.0,),
    ".ssm.dt_b_c_rms": (False,),
    ".ssm.group_count": (0, 1),
    ".use_parallel_residual": (False,),
}
"""The values at which a key that is not read changes nothing."""

OF_ONE: dict[str, dict[str, tuple[Any, ...]]] = {
    "bloom": {".attention.max_alibi_bias": (0.0, 8.0)},
    "command-r": {".use_parallel_residual": (False, True)},
    "cohere2": {".use_parallel_residual": (False, True)},
    "falcon": {".use_parallel_residual": (False, True)},
    "glm4moe": {".expert_gating_func": (0, 2)},
    "gpt-oss": {".expert_gating_func": (0, 1, 3)},
    "llama4": {
        ".expert_gating_func": (0, 2),
        ".attention.temperature_length": (8192,),
        ".attention.temperature_scale": (0.1,),
    },
}
"""The same for an architecture: what it always does, written down."""

SAME = {
    ".attention.key_length_swa": ".attention.key_length",
    ".attention.layer_norm_rms_epsilon": ".attention.layer_norm_epsilon",
    ".attention.value_length_swa": ".attention.value_length",
    ".rope.dimension_count_swa": ".rope.dimension_count",
    ".rope.freq_base_swa": ".rope.freq_base",
}
"""Keys that are not read, and must say what another says that is."""

TOKENIZER = frozenset({
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "eot_token_id",
    "eom_token_id", "unknown_token_id", "padding_token_id", "add_bos_token", "add_eos_token", "add_space_prefix",
    "token_type_count", "seperator_token_id", "mask_token_id", "cls_token_id", "remove_extra_whitespaces",
    "precompiled_charsmap", "prefix_token_id", "suffix_token_id", "middle_token_id", "fim_pre_token_id",
    "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id",
})  # fmt: skip
"""``tokenizer.ggml.``: keys that are read, that name tokens which only stand in prompts, or that other kinds have."""

OTHERS = ("adapter.", "clip.", "diffusion.", "xielu.")
"""Of files that are no language models, or of layers that none here has."""


def check_keys(metadata: Metadata, config: dict[str, Any]) -> None:
    """Raise ``ModelLoadError`` for a key that may change the output, and that nothing has read."""
    name = metadata.architecture
    allowed = {**ONLY, **OF_ONE.get(name, {})}
    if "num_experts" in config:
        allowed[".expert_weights_norm"] = (bool(config.get("norm_topk_prob", True)),)
    for full, value in metadata.file.metadata.items():
        key = full.removeprefix(name)
        if full in metadata.read or key in HARMLESS or key.startswith((".vision.", ".mm.")):
            continue
        if full.startswith("tokenizer.ggml."):
            short = full.removeprefix("tokenizer.ggml.")
            is_fine = short in TOKENIZER or (short == "add_sep_token" and value is False)
        elif full.startswith(f"{name}."):
            is_fine = not isinstance(value, StoredArray) and value in allowed.get(key, ())
            is_fine = is_fine or (key in SAME and value == metadata.file.metadata.get(name + SAME[key]))
        else:
            is_fine = not full.startswith(OTHERS)
        if not is_fine:
            shown = "a list" if isinstance(value, StoredArray) else repr(value)[:60]
            raise ModelLoadError(
                f"{metadata.file.path}: {full} is {shown}: nothing here reads it, and the model may compute otherwise "
                "because of it. Use the model's safetensors"
            )
