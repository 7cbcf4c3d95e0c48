"""Models that run through transformers' own classes, against those classes with transformers' own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import (
    SMALL,
    VOCAB,
    change_config,
    make_checkpoint,
    reference_greedy,
    reference_logits,
    token_ids,
)
from tests.helpers.lazy import lazy
from tests.helpers.models import RunnableModel, on_ranks
from torch import nn

import fwk
from fwk import SamplingParams
from fwk.errors import FwkError, ModelLoadError, PluginError
from fwk.interfaces.declaration import Facts
from fwk.plugins import choose, discover
from fwk_loaders.dummy.tokenizer import build_tokenizer

transformers = lazy("transformers")

WINDOW = {"sliding_window": 24, "num_hidden_layers": 4}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {**WINDOW, "head_dim": 32, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.3},
    "cohere2": {**WINDOW, "logit_scale": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 4, "num_attention_heads": 4},
    "falcon": {"alibi": False, "new_decoder_architecture": False},
    "mamba": {"state_size": 8},
    "bert": {},
}


def make(folder: Path, kind: str, **changes: Any) -> transformers.PreTrainedModel:
    """A random checkpoint of a model that has no plugin of its own, or of one that has."""
    if kind not in OTHERS:
        return make_checkpoint(folder, kind, **changes)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **OTHERS[kind], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    build_tokenizer(VOCAB, "test").save(str(folder / "tokenizer.json"))
    return model


def serve(folder: Path, **options: Any) -> fwk.LLM:
    settings = {"dtype": "float32", "max_total_tokens": 2048, "check_blocks": True, **options}
    return fwk.LLM(str(folder), model_impl="transformers", **settings)


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    "kind",
    [
        "llama", "mistral", "qwen3_moe", "gemma3", "deepseek_v2", "gemma2", "cohere2", "mixtral", "granite", "gpt2",
        "opt",
    ],
)  # fmt: skip
def test_greedy_tokens_through_the_whole_engine(kind: str, tmp_path: Path) -> None:
    reference = make(tmp_path, kind)
    prompts = [token_ids(n, n) for n in (70, 3, 33)]
    wanted = [reference_greedy(reference, prompt, 12) for prompt in prompts]
    settings = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with serve(tmp_path, chunked_prefill_size=13, page_size=4) as llm:
        assert llm.engine.info.chosen["models"] == "transformers"
        for _ in range(2):  # again, now from the cache
            assert [done.token_ids for done in llm.generate(prompts, settings)] == wanted


@pytest.mark.gate(6)
@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("lfm2", {}, "Lfm2ForCausalLM cannot run on a flat batch: a token's numbers depend on its neighbours"),
        ("gpt_oss", {}, "wants s_aux in attention, which fwk's backends do not know"),
        ("bloom", {}, "BloomForCausalLM does not call its attention through AttentionInterface"),
        ("falcon", {}, "has attention of its own, which cannot be replaced"),
        ("mamba", {}, "MambaForCausalLM keeps a state besides K/V"),
        ("bert", {}, "looks ahead: it is no causal language model"),
        ("llama", {"architectures": ["Nonesuch"]}, "transformers .* has no causal language model of that name"),
        (
            "llama",
            {"num_attention_heads": 5},
            "the 5 attention heads .* cannot share 2 heads",
        ),
        ("llama", {"sliding_window": 9}, "layer 0 has a sliding window that it does not tell of"),
        ("llama", {"vocab_size": 400}, r"shape \(320, 128\), but the model needs \(400, 128\)"),
        ("llama", {"num_hidden_layers": 3}, "the checkpoint lacks 9 tensors of transformers' LlamaForCausalLM"),
        ("llama", {"num_hidden_layers": 1}, "9 tensors belong to no layer of transformers"),
    ],
)
def test_what_it_cannot_run_is_refused(kind: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    make(tmp_path, kind)
    change_config(tmp_path, **settings)
    with pytest.raises(FwkError, match=message) as caught:
        serve(tmp_path)
    assert "\n" not in str(caught.value)


def test_ropes_that_follow_the_longest_sequence_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    make(tmp_path, "llama", rope_parameters=rope)
    with pytest.raises(ModelLoadError, match=r"'dynamic' changes with a .*: set --context-length 512"):
        serve(tmp_path, context_length=1024)
    serve(tmp_path).close()


def test_ranks_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "gpt2")
    with pytest.raises(ModelLoadError, match="cannot be split: set --tensor-parallel-size 1"):
        on_ranks(2, lambda tp: RunnableModel(tmp_path, tp=tp, implementation="transformers").logits([1, 2]))


def test_native_models_come_first_and_the_library_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = discover()

    def chosen(architecture: str) -> str:
        found = choose(plugins, "models", "auto", Facts(architecture=architecture)).chosen
        assert found is not None
        return found.name

    assert chosen("LlamaForCausalLM") == "llama"
    assert chosen("HeliumForCausalLM") == "transformers"
    from fwk.interfaces import declaration

    def absent(name: str) -> str:
        raise declaration.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(declaration, "installed_version", absent)
    with pytest.raises(PluginError, match=r"transformers needs the package transformers>=.*pip install 'transformers"):
        chosen("HeliumForCausalLM")


def test_linear_layers_are_fwks_and_a_missing_tensor_is_named(tmp_path: Path) -> None:
    make(tmp_path, "granite", tie_word_embeddings=False)
    model: Any = RunnableModel(tmp_path, implementation="transformers").model
    assert not [name for name, module in model.causal.named_modules() if type(module) is nn.Linear]
    assert not [name for name, module in model.body.named_modules() if type(module) is nn.Linear]
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=r"lacks the tensor 'model\.layers\.1\.input_layernorm\.weight'"):
        RunnableModel(tmp_path, implementation="transformers")


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    make(tmp_path, "granite")
    marker = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    change_config(
        tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"}
    )
    with serve(tmp_path) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].token_ids
    assert not marker.exists()


@pytest.mark.sweep
def test_two_models_in_one_process_keep_their_attention_apart(tmp_path: Path) -> None:
    settings = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    references = {kind: make(tmp_path / kind, kind) for kind in ("granite", "gemma2")}
    served = {kind: serve(tmp_path / kind) for kind in references}
    prompt = token_ids(20)
    for kind, reference in references.items():
        assert served[kind].generate([prompt], settings)[0].token_ids == reference_greedy(reference, prompt, 8)
        served[kind].close()


@pytest.mark.gate(1)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_layers_are_those_of_the_native_model(quantization: str, tmp_path: Path) -> None:
    make(tmp_path, "gemma3")
    prompts = [token_ids(n, n) for n in (70, 33)]
    settings = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    found = []
    for model_impl in ("gemma3", "transformers"):
        with fwk.LLM(
            str(tmp_path), model_impl=model_impl, dtype="float32", quantization=quantization, max_total_tokens=2048
        ) as llm:
            found.append(llm.generate(prompts, settings))
    for native, fallback in zip(*found, strict=True):
        assert native.token_ids == fallback.token_ids
        assert native.logprobs is not None
        assert fallback.logprobs is not None
        for one, other in zip(native.logprobs, fallback.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.gate(2)
@pytest.mark.parametrize("kind", ["gemma2", "cohere2", "deepseek_v2", "mixtral"])
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Soft caps, windows, scales and values smaller than keys included."""
    reference = make(tmp_path, kind)
    model = RunnableModel(tmp_path, implementation="transformers")
    prompt = token_ids(70)
    wanted = reference_logits(reference, prompt)
    actual = model.logits(prompt, [40, 25, 1, 4])
    torch.testing.assert_close(actual, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-4)
