"""Every architecture of a table against transformers in float32, on tiny random checkpoints of its own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.architectures import ARCHITECTURES, SMALL, VARIANTS, close, write
from tests.helpers.checkpoints import change_config, reference_greedy, reference_logits, token_ids
from tests.helpers.lazy import lazy
from tests.helpers.models import RunnableModel, on_ranks

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, ModelLoadError
from fwk_kit.testing.batches import block_tables

transformers = lazy("transformers")

EVERY = {**ARCHITECTURES, **VARIANTS}
RECURRENT = ["mamba2", "lfm2", "qwen3_next", "qwen3_5", "granite hybrid", "nemotron_h", "mamba", "jamba"]
CAPTURED = ["mamba2", "lfm2", "qwen3_next", "qwen3_5", "mamba"]
"""Those whose steps on a CPU are recorded; in the others torch scales residuals or computes an activation."""


SWEPT = {
    *VARIANTS.keys() - {"llama", "llama rope llama3", "qwen3", "qwen3_moe", "gemma3", "deepseek_v2"},
    *{name for name in ARCHITECTURES if " " in name}
    - {"phi3 longrope", "granite hybrid", "falcon slopes", "falcon groups"},
}
"""Settings of an architecture that the gate has with others."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.sweep] * (name in SWEPT)) for name, kind in EVERY.items()],
    ids=EVERY.keys(),
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[transformers.PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write(folder, *request.param), folder


def test_logits_however_a_text_is_cut(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    """A prompt in one go, in chunks, token by token, and in steps with others behind a cached prefix."""
    reference, folder = pair
    model = RunnableModel(folder)
    assert model.spec != "transformers"
    prompt = token_ids(80)
    wanted = reference_logits(reference, prompt)
    close(model.logits(prompt), wanted)
    close(model.logits(prompt, [33, 20, 11, 14, 1, 1]), wanted)
    assert model.weights.asked >= set(model.weights.names()) - model.weights.skipped
    prompts = [token_ids(60, 1), token_ids(33, 2), token_ids(45, 3)]
    tables = block_tables([len(p) for p in prompts])
    pasts = [20, 32, 40]
    model.step([0, 0, 0], [p[:n] for p, n in zip(prompts, pasts, strict=True)], tables)
    out = model.step(pasts, [p[n:] for p, n in zip(prompts, pasts, strict=True)], tables)
    for rows, text, past in zip(out, prompts, pasts, strict=True):
        close(rows, reference_logits(reference, text)[past:])


@pytest.mark.gate(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_ranks_together_are_the_model(name: str, tmp_path: Path) -> None:
    reference = write(tmp_path, *ARCHITECTURES[name])
    prompt = token_ids(40)
    wanted = reference_logits(reference, prompt)
    for logits in on_ranks(2, lambda tp: RunnableModel(tmp_path, tp=tp).logits(prompt, [30, 1, 9])):
        close(logits, wanted)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_layers_behind_the_last_one_are_left_out(name: str, tmp_path: Path) -> None:
    write(tmp_path, *ARCHITECTURES[name])
    tensors = load_file(tmp_path / "model.safetensors")
    further = f"model.layers.{SMALL['num_hidden_layers']}.enorm.weight"
    save_file({**tensors, further: torch.ones(SMALL["hidden_size"])}, tmp_path / "model.safetensors")
    assert further in RunnableModel(tmp_path).weights.skipped


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "routing by 'noaux_tc' and 'softmax'"),
        ("glm4_moe", {"n_group": 8, "topk_group": 4}, "8 experts in 8 groups: a group needs two"),
        ("olmoe", {"clip_qkv": 8.0}, "'clip_qkv' is 8.0"),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset 8 and attn_layer_period 2 must be"),
        ("jamba", {"expert_layer_offset": 3}, "expert_layer_offset 3 must be less than expert_layer_period 3"),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral'"),
        ("llama", {"hidden_act": "relu6"}, "'relu6'"),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe"]}, "layer 1 is of kind 'moe': .* experts without a gate"),
    ],
)
def test_unknown_ways_are_named(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, *EVERY[name])
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        RunnableModel(tmp_path)


@pytest.mark.gate(4)
@pytest.mark.parametrize("name", RECURRENT)
def test_native_operators_of_recurrent_layers(name: str, tmp_path: Path) -> None:
    """As transformers computes them, however a prompt is cut; with states in bfloat16 nearly so."""
    reference, prompt = write(tmp_path, *ARCHITECTURES[name]), token_ids(150)
    model = RunnableModel(tmp_path, operators="cpu")
    whole = model.logits(prompt)
    close(whole, reference_logits(reference, prompt))
    close(model.logits(prompt, [70, 9, *([1] * 71)]), whole)
    for state in model.context.recurrent_states:
        state.dtypes["sum"] = torch.bfloat16
        state.allocate(8, torch.device("cpu"))
    assert (model.logits(prompt, [149, 1]) - whole).abs().max() < 0.05 * whole.abs().max()


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_model_continues_from_a_kept_state(name: str, tmp_path: Path) -> None:
    """The second turn of a chat, and a prompt that leaves the first one's way."""
    reference = write(tmp_path, *ARCHITECTURES[name])
    settings = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    first = token_ids(90, 1)
    sized: dict[str, Any] = {"max_total_tokens": 2048, "page_size": 4, "chunked_prefill_size": 32}
    with fwk.LLM(str(tmp_path), dtype="float32", check_blocks=True, mamba_track_interval=8, **sized) as llm:
        assert (llm.engine.info.chosen["step"] == "captured") == (name in CAPTURED)
        [done] = llm.generate([first], settings)
        turns = [[*first, *done.token_ids, *token_ids(7, 2)], [*first[:70], *token_ids(9, 3)], first]
        for turn, cached in zip(turns, (112, 64, 88), strict=True):
            [found] = llm.generate([turn], settings)
            assert found.token_ids == reference_greedy(reference, turn, 24)
            assert found.cached_tokens == cached


def test_what_recurrent_models_cannot_have_is_refused(tmp_path: Path) -> None:
    write(tmp_path, *ARCHITECTURES["lfm2"])
    for options, message in (
        ({"prefix_cache": "hierarchical"}, "--prefix-cache hierarchical: .* has recurrent layers"),
        ({"max_mamba_cache_size": 3, "max_running_requests": 4}, "--max-mamba-cache-size 3: each of"),
    ):
        with pytest.raises(ConfigError, match=message):
            fwk.LLM(str(tmp_path), max_total_tokens=1024, **options)
    with fwk.LLM(str(tmp_path), max_total_tokens=1024, max_running_requests=4, max_mamba_cache_size=4) as llm:
        prompt = token_ids(60)
        for _ in range(2):
            [done] = llm.generate([prompt], SamplingParams(max_tokens=2))
            assert done.cached_tokens == 0  # no state is kept


@pytest.mark.parametrize("name", ["max_mamba_cache_size", "mamba_track_interval", "mamba_ssm_dtype"])
def test_options_of_states_are_refused_without_any(tmp_path: Path, name: str) -> None:
    write(tmp_path, *ARCHITECTURES["olmo2"])
    value = "bfloat16" if name == "mamba_ssm_dtype" else 8
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: .* has no recurrent layers: leave it out"):
        fwk.LLM(str(tmp_path), max_total_tokens=1024, **{name: value})


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", ["mamba2", "mamba", "qwen3_next"])
def test_memory_of_states_does_not_grow_with_the_context(name: str, tmp_path: Path) -> None:
    """Of a model without attention nothing does; of a hybrid, K/V of its attention layers alone."""
    write(tmp_path, name, {**ARCHITECTURES[name][1], "max_position_embeddings": 8192})
    sizes: list[tuple[int, int]] = []
    for length in (256, 8192):
        sized: dict[str, Any] = {"context_length": length, "max_total_tokens": length, "max_running_requests": 2}
        with fwk.LLM(str(tmp_path), dtype="float32", **sized) as llm:
            [done] = llm.generate([token_ids(length - 56)], SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(done.token_ids) == 4
            models = llm.engine.executor._worker._builder._models  # type: ignore[attr-defined]
            states = sum(tensor.nbytes for state in models.recurrent_states for tensor in state.tensors.values())
            kv = sum(layer.kv_cache.nbytes for layer in models.layers if layer.kv_cache is not None)
            sizes.append((states, kv))
    assert sizes[0][0] == sizes[1][0] > 0
    assert (sizes[0][1] == sizes[1][1] == 0) == name.startswith("mamba")


def test_states_in_bfloat16_are_nearly_the_same(tmp_path: Path) -> None:
    reference, prompt = write(tmp_path, *ARCHITECTURES["mamba2"]), token_ids(40)
    wanted = reference_logits(reference, prompt)
    settings = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with fwk.LLM(str(tmp_path), dtype="float32", mamba_ssm_dtype="bfloat16", chunked_prefill_size=5) as llm:
        [done] = llm.generate([prompt], settings)
    found = torch.tensor([entry.logprob for entry in (done.prompt_logprobs or [])[1:] if entry])
    exact = wanted.log_softmax(-1)[torch.arange(39), torch.tensor(prompt[1:])]
    assert 0 < (found - exact).abs().max() < 0.2


def test_the_language_model_of_one_that_sees(tmp_path: Path) -> None:
    """Qwen3.5's checkpoints nest their config; a run of text alone leaves their eyes out."""
    reference, prompt = write(tmp_path, *ARCHITECTURES["qwen3_5"]), token_ids(40)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    eyes = {"model.visual.patch_embed.proj.weight": torch.ones(3)}
    save_file(renamed | eyes, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    text.pop("architectures")
    path.write_text(json.dumps({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}))
    close(RunnableModel(tmp_path).logits(prompt, [30, 10]), reference_logits(reference, prompt))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_through_the_whole_engine(name: str, tmp_path: Path) -> None:
    """With the plugins that auto takes: chunked prefill, a shared prefix, and pre-emption in a small cache."""
    reference = write(tmp_path, *ARCHITECTURES[name])
    prompts = [token_ids(n, n) for n in (70, 3, 33)]
    prompts.append([*prompts[0][:48], *token_ids(9, 4)])
    wanted = [reference_greedy(reference, prompt, 16) for prompt in prompts]
    settings = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    for options in ({}, {"chunked_prefill_size": 13, "page_size": 4, "max_total_tokens": 160}):
        sized = {"max_total_tokens": 2048, **options}
        with fwk.LLM(str(tmp_path), dtype="float32", check_blocks=True, **sized) as llm:
            assert [done.token_ids for done in llm.generate(prompts, settings)] == wanted


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_follows_transformers(name: str, tmp_path: Path) -> None:
    """No further from the truth than transformers' own bfloat16."""
    reference = write(tmp_path, *VARIANTS[name]).to(torch.bfloat16)
    prompt = token_ids(40)
    wanted = reference_logits(reference, prompt).float()
    exact = reference_logits(reference.float(), prompt)
    actual = RunnableModel(tmp_path, dtype=torch.bfloat16).logits(prompt, [30, 1, 9]).float()
    assert (actual - exact).abs().mean() <= 1.2 * (wanted - exact).abs().mean()
