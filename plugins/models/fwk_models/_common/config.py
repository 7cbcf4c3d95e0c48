"""config.json as transformers' configuration class of an architecture completes it.

A class fills in what a file leaves out, and derives more: which layers have windows, how angles are stretched. Files
written before transformers 5 leave out much, and those of nested models whatever is at its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelSpec

Config = dict[str, Any]
Names = Mapping[str, tuple[str, ...]]

NULLS = frozenset({
    "attention_chunk_size", "attn_logit_softcapping", "block_ffn_dim_multiplier", "bos_token_id", "clip_qkv",
    "decoder_start_token_id", "eos_token_id", "final_logit_softcapping", "full_attn_idxs", "head_dim", "layer_types",
    "moe_layers", "n_group", "n_inner", "no_rope_layers", "num_decoder_layers", "num_key_value_heads", "num_kv_heads",
    "pad_token_id", "q_lora_rank", "sliding_window", "time_step_limit", "topk_group",
})  # fmt: skip
"""Keys of which ``null`` says something; of all others it is as if the key were not there."""

FOREIGN = frozenset({
    "attn_logit_softcapping", "final_logit_softcapping", "layer_types", "partial_rotary_factor",
    "query_pre_attn_scalar", "rope_local_base_freq", "rotary_emb_base", "rotary_pct", "sliding_window",
    "use_sliding_window",
})  # fmt: skip
"""Keys that an architecture's class ignores unless they are among its own: what stands in a file is of no effect."""

ONLY: dict[str, tuple[Any, ...]] = {
    "per_layer_config": ({},),
}
"""Keys of any architecture that change what is computed, and the values that are."""

TRAINING = frozenset({
    "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout",
    "decoder_layerdrop", "dropout", "dropout_rate", "embd_pdrop", "embedding_dropout", "encoder_layerdrop",
    "hidden_dropout", "hidden_dropout_prob", "init_std", "initializer_factor", "initializer_range", "layerdrop",
    "rescale_prenorm_residual", "resid_pdrop", "residual_dropout", "router_aux_loss_coef", "router_jitter_noise",
    "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_scale",
})  # fmt: skip
"""Keys that matter while a model is trained, or before."""

HARMLESS = TRAINING | {
    "add_cross_attention", "bos_token_id", "chunk_size", "chunk_size_feed_forward", "forced_eos_token_id",
    "is_decoder", "is_encoder_decoder", "label2id", "mamba_chunk_size", "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap", "mtp_layers_block_type", "num_logits_to_keep", "num_mtp_layers",
    "num_nextn_predict_layers", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "reorder_and_upcast_attn", "residual_in_fp32", "return_dict", "slow_but_exact", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "transformers_version",
    "use_associative_scan", "use_cache", "use_mamba_kernels", "use_mambapy",
}  # fmt: skip
"""Keys of transformers' classes that change no number of a served model: of training, or how and what to return."""


@dataclass(frozen=True, kw_only=True)
class ConfiguredSpec(ModelSpec):
    """``ModelSpec`` of a model whose config.json is read as transformers reads it.

    defaults: by architecture, what its class has where a file says nothing; every key the model reads is in it, or its
        default is None and it is in ``optional``.
    names: further names of a key, of which the first that is there counts; a key among its own names has that rank.
    only: keys that the model does not compute, and the values of them that it does.
    """

    defaults: Mapping[str, Mapping[str, Any]] = field(hash=False)
    optional: frozenset[str] = frozenset()
    names: Names = field(default_factory=dict[str, tuple[str, ...]], hash=False)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]], hash=False)

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        names = cast("list[Any]", raw.get("architectures") or [""])
        architecture = self.decoder_of(str(names[0])) or str(names[0])
        table = self.defaults.get(architecture)
        if table is None:
            return raw
        config = completed(renamed(raw, self.names), table, self.optional)
        for name, values in {**ONLY, **self.only}.items():
            value = config.get(name)
            if value is not None and value not in values:
                served = " or ".join(repr(x) for x in values)
                raise ModelLoadError(f"config.json: {name!r} is {value!r}: {self.name} is served with {served}")
        return self.derived(config, architecture)

    def derived(self, config: Config, architecture: str) -> Config:
        """What follows from other keys. config: complete, and the caller's own."""
        return with_rope(config)


def renamed(raw: Mapping[str, Any], names: Names) -> Config:
    """A copy of ``raw`` with one name for each key."""
    config = dict(raw)
    for name, others in names.items():
        ranked = others if name in others else (name, *others)
        found = [other for other in ranked if config.get(other) is not None]
        if found:
            config[name] = config[found[0]]
    return config


def completed(config: Config, table: Mapping[str, Any], optional: frozenset[str] = frozenset()) -> Config:
    """``config`` with what ``table`` has besides, without keys that are foreign to it."""
    said = {name: value for name, value in config.items() if value is not None or name in NULLS}
    known = {*table, *optional}
    found = {name: value for name, value in said.items() if name in known or name not in FOREIGN}
    if "eos_token_id" in table and "eos_token_id" not in found:
        found["default_eos_token_id"] = table["eos_token_id"]
    return {**{name: value for name, value in table.items() if name != "eos_token_id"}, **found}


def every_nth(count: int, nth: int, kind: str = "sliding_attention") -> list[str]:
    """Kinds of layers: each ``nth`` sees everything, the others are of ``kind``."""
    return ["full_attention" if nth and (index + 1) % nth == 0 else kind for index in range(count)]


def with_later_windows(config: Config) -> Config:
    """Qwen's: ``use_sliding_window``, and layers from ``max_window_layers`` on have a window."""
    window = config["sliding_window"] if config["use_sliding_window"] else None
    if config.get("layer_types") is None:
        count, first = number_of(config, "num_hidden_layers"), number_of(config, "max_window_layers", 0)
        first = count if window is None else min(first, count)
        config["layer_types"] = ["full_attention"] * first + ["sliding_attention"] * (count - first)
    return {**config, "sliding_window": window}


def with_attention_interval(config: Config) -> Config:
    """Qwen's hybrids: each ``full_attention_interval``-th layer has attention, the others a state."""
    if config.get("layer_types") is None:
        count, nth = number_of(config, "num_hidden_layers"), number_of(config, "full_attention_interval")
        config["layer_types"] = every_nth(count, nth, "linear_attention")
    return config


def number_of(config: Config, name: str, low: int = 1, high: int = 2**16) -> int:
    """A whole number of the config. Raises ``ModelLoadError``."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise ModelLoadError(f"config.json: {name!r} must be a whole number of at least {low}, not {value!r}")
    return value


def with_rope(config: Config) -> Config:
    """The rotary settings in one place, complete: ``rope_parameters``."""
    theta, partial = config.pop("rope_theta", None), config.get("partial_rotary_factor")
    given = config.pop("rope_scaling", None) or config.pop("rope_parameters", None) or {}
    if not isinstance(given, Mapping):
        raise ModelLoadError(f"config.json: the rotary settings must be an object, not {given!r}")
    given = cast("Mapping[str, Any]", given)
    layer_types = cast("list[str]", config.get("layer_types") or [])
    nested = {kind: dict(given[kind] or {}) for kind in given if kind in layer_types}

    def complete(rope: Mapping[str, Any]) -> Config:
        rope = {"rope_theta": theta or 10_000.0, **{name: value for name, value in rope.items() if value is not None}}
        share = rope.pop("partial_rotary_factor", partial)
        return _complete_rope(rope if partial is None else {**rope, "partial_rotary_factor": share}, config)

    found = {kind: complete(rope) for kind, rope in nested.items()} if nested else complete(given)
    return {**config, "rope_parameters": found}


def _complete_rope(rope: Config, config: Config) -> Config:
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope


def with_two_ropes(config: Config, *, theta: float, local_theta: float) -> Config:
    """Rotary settings of layers that see everything, and of those with a window: scaling is of the former alone.

    Both kinds are there whatever the layers are; settings that are not of a kind count for neither.
    """
    given = cast("Mapping[str, Any]", config.pop("rope_parameters", None) or {})
    plain = {"rope_type": "default"}
    full: Config = {**(given.get("full_attention") or plain), **(config.pop("rope_scaling", None) or {})}
    local: Config = dict(given.get("sliding_attention") or plain)
    full.setdefault("rope_theta", config.pop("rope_theta", None) or theta)
    local.setdefault("rope_theta", config.pop("rope_local_base_freq", None) or local_theta)
    ropes = {"full_attention": _complete_rope(full, config), "sliding_attention": _complete_rope(local, config)}
    return {**config, "rope_parameters": ropes}
