"""A Hugging Face style config.json from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fwk.errors import ModelLoadError
from fwk_loaders.gguf.architecture import Architecture
from fwk_loaders.gguf.architectures import ARCHITECTURES, CHATGLM_JOINED, FALCON_TWO_NORMS, MIXTRAL
from fwk_loaders.gguf.families import FURTHER, PARTIAL_ROTARY, latent_head_dim
from fwk_loaders.gguf.metadata import Metadata
from fwk_loaders.gguf.recurrent import GRANITE_HYBRID_EXPERTS

_MAX_LAYERS = 2**16 - 1
WINDOWED = ("llama", "gemma2", "gemma3", "cohere2", "gpt-oss", "olmo2", "phi3", "starcoder2")
"""Architectures some of whose layers may have a window."""
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
CONTROL = 3
"""Token type of tokens that steer the model and are no text."""


def architecture_of(metadata: Metadata) -> Architecture:
    """Raises ``ModelLoadError`` for files of other architectures, parts of split files and mixtures of experts."""
    path, name = metadata.file.path, metadata.architecture
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise ModelLoadError(
            f"{path}: the architecture {name[:40]!r} cannot be read from GGUF; supported: {', '.join(ARCHITECTURES)}. "
            "Use the model's safetensors"
        )
    if metadata.integer("split.count", 0) > 1:
        raise ModelLoadError(
            f"{path}: one part of a split file; join the parts first: llama-gguf-split --merge FIRST_PART OUT.gguf"
        )
    has_experts = metadata.integer(".expert_count", 0) > 0
    architecture = _variant(metadata, architecture, has_experts=has_experts)
    if has_experts and not architecture.has_experts:
        raise ModelLoadError(
            f"{path}: experts of the architecture {name!r} cannot be read from GGUF. Use the model's safetensors"
        )
    return architecture


def _variant(metadata: Metadata, architecture: Architecture, *, has_experts: bool) -> Architecture:
    """Architectures of which files differ in more than numbers."""
    name, tensors = metadata.architecture, metadata.file.tensors
    if has_experts and name == "llama":
        return MIXTRAL
    if name == "falcon" and "blk.0.attn_norm_2.weight" in tensors:
        return FALCON_TWO_NORMS
    if name == "chatglm" and "blk.0.attn_qkv.weight" in tensors:
        return CHATGLM_JOINED
    if has_experts and (name == "granitehybrid" or (name == "granitemoe" and "blk.0.ffn_up_shexp.weight" in tensors)):
        return GRANITE_HYBRID_EXPERTS
    return architecture


def read_config(metadata: Metadata) -> dict[str, Any]:
    """Everything ``ModelConfig`` and the models read. Raises ``ModelLoadError`` naming the key that is wrong."""
    architecture = architecture_of(metadata)
    tensors = metadata.file.tensors
    num_layers = metadata.integer(".block_count", low=1, high=_MAX_LAYERS)
    num_layers -= metadata.integer(".nextn_predict_layers", 0, high=num_layers - 1)
    num_heads = _number(metadata, architecture, ".attention.head_count", num_layers)
    hidden_size = metadata.integer(".embedding_length", low=1)
    head_dim = latent_head_dim(metadata) if architecture.is_latent else _head_dim(metadata, hidden_size // num_heads)
    inner = 4 * hidden_size if architecture.has_experts else None  # of layers without experts, if there are any
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(metadata),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _number(metadata, architecture, ".attention.head_count_kv", num_layers, num_heads),
        "head_dim": head_dim,
        "intermediate_size": _number(metadata, architecture, ".feed_forward_length", num_layers, inner, 2**31 - 1),
        "max_position_embeddings": metadata.integer(".context_length", low=1),
        "rms_norm_eps": metadata.number(_eps(metadata)),
        "hidden_act": "silu",
        "rope_theta": metadata.number(".rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "dtype": "bfloat16" if any(item.type.name != "F32" for item in tensors.values()) else "float32",
        **architecture.config,
    }
    if architecture.has_experts:
        config["num_experts"] = metadata.integer(".expert_count", low=1, high=2**16 - 1)
        config["num_experts_per_tok"] = metadata.integer(".expert_used_count", low=1, high=2**16 - 1)
        config["moe_intermediate_size"] = metadata.integer(
            ".expert_feed_forward_length", config["intermediate_size"], low=1
        )
    if metadata.architecture in WINDOWED and metadata.has(".attention.sliding_window"):
        config["sliding_window"] = metadata.integer(".attention.sliding_window") or None
        if config["sliding_window"] and config["architectures"] == ["LlamaForCausalLM"]:  # has no windows by itself
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    elif metadata.architecture != "gemma2":  # which has one even if the file does not say so
        config["sliding_window"] = None
    config["eos_token_id"] = None
    for name in ("bos", "eos"):
        token_id = special_id(metadata, name)
        if token_id is not None:
            config[f"{name}_token_id"] = token_id
    config |= {name: metadata.number(key) for name, key in architecture.numbers.items() if metadata.has(key)}
    if metadata.architecture in PARTIAL_ROTARY:
        rotated = metadata.integer(".rope.dimension_count", head_dim, low=1, high=head_dim)
        config["partial_rotary_factor"] = rotated / head_dim
    further = FURTHER.get(metadata.architecture)
    if further is not None:
        config |= further(metadata, config)
    return config


def _number(
    metadata: Metadata,
    architecture: Architecture,
    key: str,
    num_layers: int,
    default: int | None = None,
    high: int = 2**16 - 1,
) -> int:
    """Heads or features of every layer that has any; 1 where none has."""
    if not architecture.is_recurrent:
        return metadata.integer(key, default, low=1, high=high)
    return max(1, *metadata.per_layer(key, num_layers, default, high))


def special_id(metadata: Metadata, name: str) -> int | None:
    """The id of ``bos``, ``eos``, ``unknown``, ``padding``, ``eot`` or ``eom``; None when the file names none."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.integer(key, 2**32 - 1, high=2**32 - 1)  # absent, or the -1 of old converters
    if value == 2**32 - 1:
        return None
    vocab_size = _vocab_size(metadata)
    if value >= vocab_size:
        raise metadata.wrong(key, f"below the vocabulary size {vocab_size}", value)
    return value


def read_generation_config(metadata: Metadata) -> dict[str, Any]:
    """``eos_token_id``: every token that ends an answer, the end of a turn in a chat included."""
    found = [special_id(metadata, name) for name in ("eos", "eot", "eom")]
    if metadata.has("tokenizer.ggml.tokens") and metadata.has("tokenizer.ggml.token_type"):
        types = metadata.file.numbers("tokenizer.ggml.token_type")
        controls = [token_id for token_id, kind in enumerate(types) if kind == CONTROL]
        tokens = metadata.file.strings("tokenizer.ggml.tokens", max(controls, default=-1) + 1)  # mostly the first few
        found += [token_id for token_id in controls if token_id < len(tokens) and tokens[token_id] in _END_OF_TURN]
    eos = list(dict.fromkeys(token_id for token_id in found if token_id is not None))
    config: dict[str, Any] = {"eos_token_id": eos} if eos else {}
    bos, pad = special_id(metadata, "bos"), special_id(metadata, "padding")
    config |= {} if bos is None else {"bos_token_id": bos}
    return config | ({} if pad is None else {"pad_token_id": pad}) | _sampling(metadata)


SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""``general.sampling.``: what llama.cpp calls otherwise than transformers."""


def _sampling(metadata: Metadata) -> dict[str, Any]:
    """What the file recommends, by the names of generation_config.json."""
    start, found = "general.sampling.", metadata.file.metadata
    given = {key.removeprefix(start): value for key, value in found.items() if key.startswith(start)}
    return {
        SAMPLING.get(name, name): metadata.number(start + name) if type(value) is float else value
        for name, value in given.items()
    }


def _vocab_size(metadata: Metadata) -> int:
    """Rows of the embedding: it may have more than there are tokens."""
    embedding = metadata.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        what = "is missing" if embedding is None else f"has the shape {embedding.shape}, but needs two dimensions"
        raise ModelLoadError(f"{metadata.file.path}: tensor 'token_embd.weight' {what}; the file is no whole model")
    return embedding.shape[0]


def _eps(metadata: Metadata) -> str:
    key = ".attention.layer_norm_epsilon"
    return key if metadata.has(key) else ".attention.layer_norm_rms_epsilon"


def _head_dim(metadata: Metadata, default: int) -> int:
    head_dim = metadata.integer(".attention.key_length", default, low=1, high=2**16 - 1)
    is_whole = metadata.architecture not in PARTIAL_ROTARY
    for key in (".attention.value_length", *([".rope.dimension_count"] if is_whole else [])):
        if metadata.integer(key, head_dim) != head_dim:
            raise metadata.wrong(key, f"the size of a head, {head_dim}: other sizes cannot be read from GGUF", "that")
    return head_dim


def _rope_scaling(metadata: Metadata, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in metadata.file.tensors:
        return _llama3_scaling(metadata, head_dim)
    kind = metadata.string(".rope.scaling.type", "none")
    factor = metadata.number(".rope.scaling.factor", metadata.number(".rope.scale_linear", 1.0))
    if kind == "none" and not metadata.has(".rope.scale_linear"):
        return None
    if kind not in ("none", "linear", "yarn") or not factor > 0:
        raise metadata.wrong(".rope.scaling.type", "none, linear or yarn, with a factor above 0", (kind, factor))
    if kind != "yarn":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.integer(".rope.scaling.original_context_length", low=1)
    betas = {name: f".rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
    found = {name: metadata.number(key) for name, key in betas.items() if metadata.has(key)}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **found}


def _llama3_scaling(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Llama 3.1 and later: the file holds a divisor for each rotary frequency, config.json the rule that made them.

    The largest divisor is the rule's factor; the other three constants are the same in every released model. They are
    checked against the divisors.
    """
    info = metadata.file.tensors["rope_freqs.weight"]
    where = f"{metadata.file.path}: tensor 'rope_freqs.weight'"
    if info.type.name != "F32" or info.shape != (head_dim // 2,):
        raise ModelLoadError(f"{where} must hold {head_dim // 2} float32 values, not {info.shape} of {info.type.name}")
    stored = np.frombuffer(metadata.file.buffer, "<f4", head_dim // 2, info.start)
    factor, low, high, original = round(float(stored.max()), 4) if np.isfinite(stored).all() else 0.0, 1.0, 4.0, 8192
    theta = metadata.number(".rope.freq_base", 10_000.0)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    if metadata.architecture == "llama4":  # from one frequency to the next, without a range between
        high, smooth = low, (original / wavelengths > low).astype(float)
    if not factor >= 1 or not np.allclose(1 / ((1 - smooth) / factor + smooth), stored, rtol=1e-4):
        raise ModelLoadError(f"{where} follows no rule known here (llama3). Use the model's safetensors")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
