"""What is served of a config.json is what transformers' configuration class makes of it."""

from __future__ import annotations

import itertools
import json
import re
import types
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

import fwk
import fwk_models
from fwk.errors import FwkError, ModelLoadError
from fwk.plugins import discover
from fwk.types import ModelConfig
from fwk_models._common.config import HARMLESS, NULLS, ONLY, ConfiguredSpec

KINDS = {
    "BartForConditionalGeneration": "bart", "BertModel": "bert", "RobertaModel": "roberta",
    "XLMRobertaModel": "xlm-roberta", "BloomForCausalLM": "bloom", "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2", "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3",
    "FalconForCausalLM": "falcon", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text", "GlmForCausalLM": "glm", "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe", "GPT2LMHeadModel": "gpt2", "GPTNeoXForCausalLM": "gpt_neox",
    "GptOssForCausalLM": "gpt_oss", "GraniteForCausalLM": "granite", "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid", "JambaForCausalLM": "jamba", "Lfm2ForCausalLM": "lfm2",
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
    "Llama4ForCausalLM": "llama4_text", "MambaForCausalLM": "mamba", "FalconMambaForCausalLM": "falcon_mamba",
    "Mamba2ForCausalLM": "mamba2", "MixtralForCausalLM": "mixtral", "NemotronHForCausalLM": "nemotron_h",
    "Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3", "OlmoeForCausalLM": "olmoe", "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3", "Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe", "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text", "Qwen3NextForCausalLM": "qwen3_next",
    "SmolLM3ForCausalLM": "smollm3", "Starcoder2ForCausalLM": "starcoder2", "T5ForConditionalGeneration": "t5",
    "WhisperForConditionalGeneration": "whisper",
}  # fmt: skip
"""By architecture, transformers' name of its class."""

UNKNOWN = {
    "BaichuanForCausalLM", "BaiChuanForCausalLM", "ChatGLMModel", "ChatGLMForConditionalGeneration",
    "InternLM2ForCausalLM", "InternLM3ForCausalLM", "MiniCPMForCausalLM",
}  # fmt: skip
"""Architectures of which transformers has no class: their configurations are code that checkpoints bring."""

NESTED = {
    "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration", "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "InternVLForConditionalGeneration", "Mistral3ForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
}  # fmt: skip
SAME = {
    "BertForSequenceClassification": "BertModel", "HF_ColBERT": "BertModel", "RWForCausalLM": "FalconForCausalLM",
    "RobertaForSequenceClassification": "RobertaModel", "XLMRobertaForSequenceClassification": "XLMRobertaModel",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM", "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
}  # fmt: skip

SMALL = {"num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 5, "n_embd": 64, "n_head": 4, "vocab_size": 320},
    "bloom": {"n_layer": 5, "hidden_size": 64, "n_head": 4, "vocab_size": 320},
    "bart": {"decoder_layers": 5, "d_model": 64, "decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "t5": {"num_layers": 5, "d_model": 64, "num_heads": 4},
    "mamba2": {**SMALL, "num_heads": 8, "head_dim": 16},
    "granitemoehybrid": {**SMALL, "mamba_n_heads": 4},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "vocab_size": 320},
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
SCALED = {"rope_type": "linear", "factor": 4.0}
OLDER: list[dict[str, Any]] = [
    {"sliding_window_pattern": 2},
    {"sliding_window_pattern": 3, "sliding_window": 7},
    {"layer_switch": 3},
    {"layer_switch": 3, "sliding_window_pattern": 2},
    {"sliding_window": 7},
    {"sliding_window": None},
    *({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": count} for count in (0, 2, 5, 99)),
    {"use_sliding_window": True},
    {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 7, "no_rope_layer_interval": 2},
    {"no_rope_layer_interval": 3},
    {"no_rope_layers": [1, 1, 0, 0, 1]},
    {"interleave_moe_layer_step": 2},
    {"full_attention_interval": 2},
    {"attn_layer_period": 3, "attn_layer_offset": 1},
    {"full_attn_idxs": [1, 3]},
    {"hybrid_override_pattern": "M-*-"},
    {"layers_block_type": ["mamba", "attention", "mamba", "attention", "mamba"]},
    {"layer_types": ["full_attention", "sliding_attention"] * 3},
    {"rope_theta": 12345.0},
    {"rope_theta": 12345, "rope_scaling": SCALED},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 77}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_scaling": LONG},
    {"rope_scaling": {**LONG, "type": "su", "rope_type": "su"}},
    {"rope_scaling": LONG, "original_max_position_embeddings": 99},
    {"rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}},
    {"rope_parameters": SCALED, "rope_theta": 99.0},
    {"rope_theta": 12345.0, "rope_local_base_freq": 77.0},
    {"rope_local_base_freq": 77.0},
    {"partial_rotary_factor": 0.25},
    {"rotary_pct": 0.5, "rotary_emb_base": 77},
    {"tie_embedding": False},
    {"tie_embedding": True, "tie_word_embeddings": False},
    {"block_ff_dim": 1000},
    {"n_embed": 32},
    {"hidden_act": "gelu"},
    {"hidden_activation": "gelu"},
    {"num_local_experts": 6},
    {"num_experts": 6},
    {"num_local_experts": 6, "num_experts": 12},
    {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 9},
    {"mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_dt_min": 0.1, "mamba_conv_bias": False},
    {"eos_token_id": None},
    {"eos_token_id": [3, 4]},
]
"""Keys as they were written before, and some that only one class reads: put into the config of every class."""

DERIVED = {
    "layer_types", "rope_parameters", "no_rope_layers", "moe_layers", "sliding_window", "layers_block_type",
    "use_sliding_window", "max_window_layers", "num_key_value_heads",
}  # fmt: skip
"""Keys that a class fills in by itself, left out where older ones are put in."""

Reading = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def specs() -> dict[str, ConfiguredSpec]:
    """By architecture."""
    found = [item.declaration for item in discover().family("models")]
    return {name: spec for spec in found for name in spec.architectures}  # type: ignore[attr-defined]


def cases(specs: Mapping[str, ConfiguredSpec], *, foreign: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(what, architecture, config): each key of each class left out, set to null, and with what older files say.

    foreign: older keys of other classes instead.
    """
    from transformers import CONFIG_MAPPING

    for architecture, kind in KINDS.items():
        cls, spec = CONFIG_MAPPING[kind], specs[architecture]
        whole = cls(**CHANGES.get(kind, SMALL)).to_dict()
        plain = {key: value for key, value in whole.items() if key not in DERIVED}
        own = {*spec.defaults[architecture], *spec.optional, *sum(spec.names.values(), ()), "rope_scaling"}
        for more in OLDER:
            if own.isdisjoint(more) == foreign:
                yield f"with {more}", architecture, {**plain, **more}
        if foreign:
            continue
        yield "nothing", architecture, {}
        yield "complete", architecture, whole
        for name in sorted(set(whole) - HARMLESS):
            yield f"without {name}", architecture, {key: value for key, value in whole.items() if key != name}
        for item in fields(cls):
            is_optional = get_origin(item.type) is types.UnionType and type(None) in get_args(item.type)
            if is_optional and item.default not in (None, MISSING) and item.name in set(whole) - HARMLESS:
                yield f"null {item.name}", architecture, {**whole, item.name: None}


def read(spec: ConfiguredSpec, architecture: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """All that the model reads: the fields of ``ModelConfig``, and its own keys."""
    raw = {**raw, "architectures": [architecture]}
    raw.pop("dtype", None)
    config = ModelConfig.from_dict(spec.normalised(raw), "config.json")
    found = {item.name: getattr(config, item.name) for item in fields(config) if item.name not in ("raw", "rope")}
    count = config.num_layers
    found["kinds"] = [config.layer_type(index) for index in range(count)]
    if set(found["kinds"]) <= {"full_attention", "sliding_attention"}:
        found["windows"] = [config.window_of(index) for index in range(count)]
    if "sliding_window" not in {*spec.defaults[architecture], *spec.optional}:
        assert config.sliding_window is None
    if not found["eos_token_ids"]:
        ids = config.raw.get("default_eos_token_id")
        found["eos_token_ids"] = tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)
    found["ropes"] = {
        kind: {**rope.scaling, "rope_type": rope.kind, "rope_theta": rope.theta, "type": None}
        for kind, rope in config.ropes.items()
    }
    names = {*spec.defaults[architecture], "layer_types", "no_rope_layers", "moe_layers", "hidden_activation"}
    return found | {f"raw {name}": config.raw.get(name) for name in names - CONSUMED - {"layer_types"}}


CONSUMED = {
    "sliding_window_pattern", "full_attention_interval", "rotary_pct", "rotary_emb_base", "max_window_layers",
    "no_rope_layer_interval", "partial_rotary_factor", "rope_theta", "eos_token_id", "sliding_window",
    "use_sliding_window", "rms_norm_eps", "time_step_rank", "mamba_dt_rank", "tie_word_embeddings",
    "num_key_value_heads",
}  # fmt: skip
"""Keys of which only what follows from them counts, which is compared; a rank that is worked out is not written so."""


def test_every_architecture_is_compared(specs: dict[str, ConfiguredSpec]) -> None:
    assert set(specs) == {*KINDS, *UNKNOWN, *NESTED, *SAME}
    for name, same in SAME.items():
        assert specs[name].defaults[name] == specs[same].defaults[same], name


@pytest.mark.sweep
def test_a_null_is_what_its_class_makes_of_it(specs: dict[str, ConfiguredSpec]) -> None:
    """Each key of each class and each older name, in files that say all, little and next to nothing.

    A null that the class keeps, and cannot compute with, is as if the key were not there.
    """
    from transformers import CONFIG_MAPPING, logging

    logging.set_verbosity_error()
    wrong: list[str] = []
    for architecture, kind in KINDS.items():
        cls, spec, small = CONFIG_MAPPING[kind], specs[architecture], CHANGES.get(kind, SMALL)
        whole = cls(**small).to_dict()
        plain = {key: value for key, value in whole.items() if key not in DERIVED}
        keys = {
            *whole,
            *spec.optional,
            *spec.defaults[architecture],
            *sum(spec.names.values(), ()),
            *itertools.chain(*OLDER),
        }
        for raw, name in itertools.product((whole, plain, small), sorted(keys - HARMLESS)):
            others = {key: value for key, value in raw.items() if key != name}
            try:
                made = cls(**deepcopy({**others, name: None}))
            except Exception:
                continue
            ropes = list(nulls_of(getattr(made, "rope_parameters", None)))
            is_kept = (getattr(made, name, 0) is None and name not in NULLS) or "rope_theta" in ropes
            wanted = others if is_kept else made.to_dict()
            if outcome(spec, architecture, wanted) != outcome(spec, architecture, {**others, name: None}):
                wrong.append(f"{architecture} null {name}")
    assert not wrong, "\n".join(wrong)


def nulls_of(given: Any) -> Iterator[str]:
    """Names of whatever is null, at any depth."""
    for name, value in given.items() if isinstance(given, dict) else ():
        yield from [name] if value is None else nulls_of(value)


@pytest.mark.sweep
@pytest.mark.parametrize("foreign", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_config_is_what_its_class_makes_of_it(specs: dict[str, ConfiguredSpec], foreign: bool) -> None:
    from transformers import CONFIG_MAPPING, logging

    logging.set_verbosity_error()
    wrong: list[str] = []
    for what, architecture, raw in cases(specs, foreign=foreign):
        try:
            made = CONFIG_MAPPING[KINDS[architecture]](**deepcopy(raw)).to_dict()
        except Exception:
            continue
        wanted, found = (outcome(specs[architecture], architecture, given) for given in (made, raw))
        if wanted != found:
            shown = {key: (found.get(key), wanted.get(key)) for key in wanted if wanted.get(key) != found.get(key)}
            wrong.append(f"{architecture} {what}: {shown or found}")
    assert not wrong, "\n".join([f"{len(wrong)} (found, wanted):", *wrong[:60]])


def outcome(spec: ConfiguredSpec, architecture: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return read(spec, architecture, raw)
    except FwkError as error:
        return {"error": str(error)}


OUTSIDE = {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Idefics3ForConditionalGeneration",
           "SmolVLMForConditionalGeneration", "Qwen3VLForConditionalGeneration", "InternVLForConditionalGeneration",
           "Mistral3ForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
           "Gemma3ForConditionalGeneration"}  # fmt: skip
"""Of these the outer config says whether the head is the embedding; of Llama 4 the inner one, of others either."""


def test_a_nested_config_says_in_one_place_whether_the_head_is_the_embedding(specs: dict[str, ConfiguredSpec]) -> None:
    """As transformers' models read it (5.24): tried with models of each class, with both set to each value."""
    for architecture in {*OUTSIDE, *NESTED, "Llama4ForConditionalGeneration"}:
        for outer, inner in itertools.product((None, True, False), repeat=2):
            raw: dict[str, Any] = {"tie_word_embeddings": outer, "text_config": {"tie_word_embeddings": inner}}
            raw |= {"vision_config": {}, "audio_config": {}, "architectures": [architecture]}
            config = ModelConfig.from_dict(specs[architecture].normalised(raw), "config.json")
            wanted = (
                outer if architecture in OUTSIDE else inner if architecture.startswith("Llama4") else outer or inner
            )
            if architecture == "Qwen2AudioForConditionalGeneration":
                wanted = False  # whatever is said
            if outer is None and architecture in (
                "InternVLForConditionalGeneration",
                "Mistral3ForConditionalGeneration",
                "Gemma3ForConditionalGeneration",
            ):
                wanted = True
            assert config.tie_word_embeddings == bool(wanted), (architecture, outer, inner)


def test_every_key_of_a_class_is_read_refused_or_harmless(specs: dict[str, ConfiguredSpec]) -> None:
    from transformers import CONFIG_MAPPING

    wrong: list[str] = []
    core = "".join(path.read_text() for path in Path(fwk.__file__).parent.glob("[tl]*/*.py"))
    common = "".join(path.read_text() for path in Path(fwk_models.__path__[0]).glob("_common/*.py"))
    table = re.compile(r"(^DEFAULTS|^LLAMA|^TABLES).*?^}", re.DOTALL | re.MULTILINE)  # a default alone is no reading
    shared = core + table.sub("", common)
    for architecture, kind in KINDS.items():
        spec = specs[architecture]
        plugin = Path(fwk_models.__path__[0], spec.load.split(".")[1])
        source = shared + table.sub("", "".join(path.read_text() for path in plugin.glob("*.py")))
        for item in fields(CONFIG_MAPPING[kind]):
            if item.name in HARMLESS or item.name in {*ONLY, *spec.only, *EXPERTS.get(kind, ()), "problem_type"}:
                continue
            if f'"{item.name}"' not in source:
                wrong.append(f"{architecture} reads no {item.name}")
            others = {other for names in spec.names.values() for other in names}
            is_declared = item.name in {*spec.defaults[architecture], *spec.optional, *others}
            if item.default is not None and not is_declared:
                wrong.append(f"{architecture}: {item.name} has no default")
    assert not wrong, "\n".join(wrong)


EXPERTS = {
    "nemotron_h": {
        "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group",
        "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor",
        "topk_group", "expand", "mamba_proj_bias", "time_step_limit",
    },
    "mamba2": {"time_step_rank", "expand", "time_step_min", "time_step_limit"},
    "mamba": {"time_step_min"},
    "falcon_mamba": {"time_step_min"},
    "granitemoehybrid": {"mamba_d_head", "time_step_limit"},
    "deepseek_v2": {"head_dim"},
    "bart": {"encoder_ffn_dim"},
    "whisper": {
        "begin_suppress_tokens", "use_weighted_layer_sum", "classifier_proj_size", "apply_spec_augment",
        "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob", "mask_feature_length",
        "mask_feature_min_masks", "median_filter_width",
    },
}  # fmt: skip
"""Keys of layers that are refused (Nemotron-H's experts), that a class reads nowhere, or read under a made-up name; of
Whisper, what is for training, for labels of sounds and for times of words, and what generation_config.json says."""


def test_values_that_are_not_computed_are_refused(specs: dict[str, ConfiguredSpec]) -> None:
    for architecture, spec in specs.items():
        for name in {**ONLY, **spec.only} if architecture in KINDS else ():
            with pytest.raises(ModelLoadError, match=f"'{name}' is 'other'.*is served with"):
                spec.normalised({"architectures": [architecture], name: "other"})


OLD = {
    "gemma3 pattern": ("gemma3_text", {"sliding_window_pattern": 2, "sliding_window": 9, "head_dim": 16}),
    "cohere2 pattern": ("cohere2", {"sliding_window_pattern": 2, "sliding_window": 9}),
    "cohere2 switch": ("cohere2", {"layer_switch": 2, "sliding_window": 9, "num_hidden_layers": 5}),
    **{
        f"{kind} {windows} windows": (
            kind,
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": windows, "num_hidden_layers": 4},
        )
        for kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
        for windows in (0, 2, 9)
    },
    "olmo3": ("olmo3", {"sliding_window": 9, "num_hidden_layers": 5}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 9, "num_local_experts": 4, "head_dim": 16, "num_hidden_layers": 3}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3 windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 5}),
    "mistral": ("mistral", {"sliding_window": 9}),
    "glm4": ("glm4", {"head_dim": 16}),
    "llama with a window": ("llama", {"sliding_window": 9}),
    "qwen3_next": ("qwen3_next", {"num_experts": 8, "num_hidden_layers": 4, "norm_topk_prob": False}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(4))
def test_logits_of_configs_that_say_nothing_needless(part: int, tmp_path: Path) -> None:
    """config.json holds what makes the model small, and nothing else: all other keys are left out at once."""
    from tests.helpers.architectures import ARCHITECTURES, SMALL, close, write
    from tests.helpers.checkpoints import reference_logits, token_ids
    from tests.helpers.models import RunnableModel

    wrong = {}
    for number, (name, (kind, changes)) in enumerate(list({**OLD, **ARCHITECTURES}.items())[part::4]):
        folder = tmp_path / str(number)
        reference = write(folder, kind, changes)
        stored = json.loads((folder / "config.json").read_text())
        raw = {**SMALL, **changes, "architectures": stored["architectures"], "model_type": stored["model_type"]}
        (folder / "config.json").write_text(json.dumps(raw))
        prompt = token_ids(40)
        try:
            close(RunnableModel(folder).logits(prompt), reference_logits(reference, prompt))
        except (AssertionError, FwkError, KeyError) as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:300]
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
