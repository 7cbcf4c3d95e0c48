"""EAGLE, EAGLE-3, MTP and Medusa: each draft is what the papers' equations make of transformers' hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.helpers.architectures import ARCHITECTURES, EXPERTS, GROUPS, LATENT, write
from tests.helpers.checkpoints import change_config
from tests.helpers.draft_heads import DRAFT_VOCAB, save_eagle, save_eagle3, save_medusa, with_predictor
from tests.helpers.lazy import lazy
from tests.helpers.tiny import save_llama
from torch import Tensor

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, FwkError, ModelLoadError
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeDecoder
from fwk_kit.testing.serving import TINY
from fwk_speculative._common.heads import HeadDecoder
from fwk_speculative.drafting.draft_store import on_host
from fwk_speculative.medusa.decoder import MedusaDecoder

transformers = lazy("transformers")

PROMPTS = [[7, 8, 9] * 6, [5] * 20, list(range(10, 50)), [100, 101, 100, 101, 100], [3]]
ENGINE: dict[str, Any] = {
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "check_blocks": True,
    "dtype": "float32",
    "speculative_adaptive": False,
}
SMALL = {"max_total_tokens": 160, "page_size": 4, "chunked_prefill_size": 9}
STEPS, WIDTH, NUM_TOKENS = 3, 2, 6
Step = Callable[[list[int], list[Tensor], int], tuple[Tensor, Tensor]]
"""Of tokens, the features before each and the number of the first: logits and feature after the last."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), seed=1)


class Proposals:
    """What a decoder was asked and proposed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, decoder: type[SpeculativeDecoder]) -> None:
        self.made: list[tuple[list[int], list[int], list[int]]] = []
        propose = decoder.propose

        def watched(own: SpeculativeDecoder, view: DraftView) -> Drafts:
            known = [view.token_ids[slot, :n].tolist() for slot, n in zip(view.slots, view.num_tokens, strict=True)]
            drafts = propose(own, view)
            token_ids, above = on_host(drafts)
            above = above or [[] for _ in known]
            for text, most, tokens, parents in zip(known, view.max_drafts, token_ids, above, strict=True):
                if most == own.max_drafts:
                    self.made.append((text, tokens, parents))
            return drafts

        monkeypatch.setattr(decoder, "propose", watched)

    def chains(self) -> Iterator[tuple[list[int], list[int]]]:
        for text, tokens, _ in self.made[:: max(1, len(self.made) // 60)]:
            yield text, tokens

    def trees(self) -> Iterator[tuple[list[int], set[tuple[int, ...]]]]:
        """The paths from the sequence's end to each draft."""
        for text, tokens, parents in self.made[:: max(1, len(self.made) // 30)]:
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(tokens, parents, strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            yield text, set(paths)


def serve(model: Path, **options: Any) -> None:
    """Greedy and sampled requests, a prompt of them twice so that it is found in the cache."""
    with fwk.LLM(str(model), **{**ENGINE, **options}) as llm:
        for settings in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3, "top_k": 8}):
            llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True, **settings))
        stats = llm.engine.stats()
        assert stats.draft_tokens > 0
        assert (stats.num_running, stats.num_held_blocks) == (0, 0)


def streams(model: Path) -> Callable[[Sequence[int]], list[Tensor]]:
    """What transformers computes: the stream before each layer, and last the normalised output."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def compute(tokens: Sequence[int]) -> list[Tensor]:
        with torch.no_grad():
            found = reference(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return [x[0] for x in found]

    return compute


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + TINY["rms_norm_eps"]) * weight


def attention(tensors: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """Causal, with rotary positions counted from 0: [n, in] to [n, hidden_size]."""
    heads, kv_heads, count = TINY["num_attention_heads"], TINY["num_key_value_heads"], len(x)
    q, k, v = (
        (x @ tensors[f"{prefix}.self_attn.{name}_proj.weight"].T).view(count, n, -1).transpose(0, 1)
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    size = q.shape[-1]
    angles = torch.arange(count)[:, None] * TINY.get("rope_theta", 1e4) ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos(), angles.sin()

    def turned(y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (turned(k), v))
    scores = turned(q) @ k.transpose(1, 2) / size**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
    return out @ tensors[f"{prefix}.self_attn.o_proj.weight"].T


def mlp(tensors: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    gate, up, down = (tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def chain(step: Step, text: list[int], features: Tensor, count: int) -> list[int]:
    """Greedy drafts after a text, its features known up to the token before the last."""
    tokens, known = text[1:], list(features)
    for _ in range(count):
        logits, feature = step(tokens, known)
        tokens = [*tokens, int(logits.argmax())]
        known = [*known, feature]
    return tokens[len(text) - 1 :]


def tree(step: Step, text: list[int], features: Tensor) -> set[tuple[int, ...]]:
    """EAGLE-2's tree, each node computed by itself from its path."""
    expanded: dict[tuple[int, ...], tuple[float, list[Tensor]]] = {(): (0.0, list(features))}
    candidates: dict[tuple[int, ...], float] = {}
    for _ in range(STEPS):
        level: dict[tuple[int, ...], tuple[float, list[Tensor]]] = {}
        for path, (score, known) in expanded.items():
            logits, feature = step([*text[1:], *path], known)
            values, tokens = torch.log_softmax(logits.double(), -1).topk(WIDTH)
            for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
                level[*path, token] = (score + value, [*known, feature])
        candidates |= {path: score for path, (score, _) in level.items()}
        expanded = dict(sorted(level.items(), key=lambda item: -item[1][0])[:WIDTH])
    return set(sorted(candidates, key=lambda path: -candidates[path])[:NUM_TOKENS])


def eagle_step(head: Path, model: Path) -> Step:
    """EAGLE (arXiv:2401.15077, figure 6): a layer over projected pairs; the target's head reads its output."""
    tensors = {name: x.float() for name, x in load_file(head / "model.safetensors").items()}
    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].float()
    output = weights.get("lm_head.weight", embedding).float()

    def step(tokens: list[int], features: list[Tensor]) -> tuple[Tensor, Tensor]:
        x = torch.cat((embedding[tokens], torch.stack(features)), -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
        x = x + attention(tensors, "layers.0", x)
        x = x + mlp(tensors, "layers.0", norm(x, tensors["layers.0.post_attention_layernorm.weight"]))
        return output @ x[-1], x[-1]

    return step


def eagle3_step(head: Path, model: Path) -> Step:
    """EAGLE-3 (arXiv:2503.01840, 3.1): embedding beside feature, both normalised; the feature is the residual."""
    tensors = {name: x.float() for name, x in load_file(head / "model.safetensors").items()}
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"].float()
    prefix = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
    chosen = torch.arange(DRAFT_VOCAB) + tensors["d2t"].long()

    def step(tokens: list[int], features: list[Tensor]) -> tuple[Tensor, Tensor]:
        g = torch.stack([x if len(x) == TINY["hidden_size"] else tensors["fc.weight"] @ x for x in features])
        e = norm(embedding[tokens], tensors[f"{prefix}.input_layernorm.weight"])
        x = g + attention(tensors, prefix, torch.cat((e, norm(g, tensors[f"{prefix}.hidden_norm.weight"])), -1))
        x = x + mlp(tensors, prefix, norm(x, tensors[f"{prefix}.post_attention_layernorm.weight"]))
        logits = torch.full((TINY["vocab_size"],), float("-inf"))
        logits[chosen] = tensors["lm_head.weight"] @ norm(x[-1], tensors["norm.weight"])
        return logits, x[-1]

    return step


HEADS = {
    "eagle": (save_eagle, eagle_step, lambda found: found[-1]),
    "eagle3": (save_eagle3, eagle3_step, lambda found: torch.cat((found[0], found[1], found[1]), -1)),
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("options", [{}, SMALL, {"attention_backend": "torch", "disable_cuda_graph": True}])
@pytest.mark.parametrize("name", HEADS)
def test_chains_are_the_papers(
    name: str, options: dict[str, Any], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, make_step, features = HEADS[name]
    head = save(tmp_path / "head")
    proposals = Proposals(monkeypatch, HeadDecoder)
    given = {"speculative_algorithm": name, "speculative_draft_model_path": str(head), "speculative_num_steps": STEPS}
    with fwk.LLM(str(target), prefix_cache="none", **{**ENGINE, **given, **options}) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0))
        assert bool(options.get("chunked_prefill_size")) == (llm.engine.stats().preemptions > 0)
    step, states = make_step(head, target), streams(target)
    assert proposals.made
    for text, tokens in proposals.chains():
        assert tokens == chain(step, text, features(states(text[:-1])), STEPS)


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", HEADS)
def test_trees_are_the_papers(name: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, make_step, features = HEADS[name]
    head = save(tmp_path / "head")
    proposals = Proposals(monkeypatch, HeadDecoder)
    given = {
        "speculative_algorithm": name.upper(),
        "speculative_draft_model_path": str(head),
        "speculative_num_steps": STEPS,
        "speculative_eagle_topk": WIDTH,
        "speculative_num_draft_tokens": NUM_TOKENS,
    }
    with fwk.LLM(str(target), prefix_cache="none", **{**ENGINE, **given}) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0))
    step, states = make_step(head, target), streams(target)
    assert proposals.made
    for text, paths in proposals.trees():
        assert paths == tree(step, text, features(states(text[:-1])))


@pytest.mark.gate(1)
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("save", [save_eagle, save_eagle3, save_medusa])
def test_output_is_the_plain_one(save: Callable[[Path], Path], width: int, target: Path, tmp_path: Path) -> None:
    """Token for token, sampled too: with prefixes found in the cache, in chunks and after pre-emption."""
    settings = (
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 3, "top_k": 8},
        {"repetition_penalty": 1.3, "seed": 4},
    )
    requests = [SamplingParams(max_tokens=30, ignore_eos=True, **given) for given in settings]
    with fwk.LLM(str(target), **{k: v for k, v in ENGINE.items() if k != "speculative_adaptive"}) as llm:
        wanted = [[done.token_ids for done in llm.generate(PROMPTS, sampling, n=2)] for sampling in requests]
    name = save.__name__.removeprefix("save_")
    given = {
        **ENGINE,
        **SMALL,
        "speculative_algorithm": name,
        "speculative_draft_model_path": str(save(tmp_path / "h")),
    }
    with fwk.LLM(str(target), **given, speculative_eagle_topk=width) as llm:
        assert [[done.token_ids for done in llm.generate(PROMPTS, sampling, n=2)] for sampling in requests] == wanted
        stats = llm.engine.stats()
        assert stats.preemptions > 0
        assert stats.cached_prompt_tokens > 0
        assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
        assert (stats.num_running, stats.num_held_blocks) == (0, 0)


@pytest.mark.gate(1)
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("is_converted", [False, True])
def test_medusas_heads_read_the_newest_state(
    width: int, is_converted: bool, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medusa (arXiv:2401.10774, 2.1.1): W2 (silu(W1 h) + h) for each further place."""
    head = save_medusa(tmp_path / "head", is_converted=is_converted)
    tensors = {name: x.float() for name, x in load_file(head / "model.safetensors").items()}
    proposals = Proposals(monkeypatch, MedusaDecoder)
    options = {"speculative_algorithm": "medusa", "speculative_draft_model_path": str(head)}
    serve(target, **options, speculative_eagle_topk=width, speculative_num_draft_tokens=6)
    states = streams(target)
    names = ("blocks.{}.layers.0", "lm_heads.{}") if is_converted else ("{}.0.linear", "{}.1")
    for text, paths in proposals.trees() if width > 1 else ():

        def step(tokens: list[int], known: list[Tensor], first: int = len(text) - 1) -> tuple[Tensor, Tensor]:
            return _medusa(tensors, names, len(tokens) - first, known[first - 1]), known[0]

        assert paths == tree(step, text, states(text[:-1])[-1])
    greedy = [made for made in proposals.chains() if made[0][:3] != [3]] if width == 1 else []
    for text, tokens in greedy[: len(greedy) // 2]:
        h = states(text[:-1])[-1][-1]
        assert tokens == [int(_medusa(tensors, names, i, h).argmax()) for i in range(3)]


def _medusa(tensors: dict[str, Tensor], names: tuple[str, str], index: int, h: Tensor) -> Tensor:
    block, head = (name.format(index) for name in names)
    return tensors[f"{head}.weight"] @ (h + F.silu(tensors[f"{block}.weight"] @ h + tensors[f"{block}.bias"]))


MTP = {
    "deepseek_v3": {**EXPERTS, **GROUPS, **LATENT},
    "glm4_moe": {**EXPERTS, **GROUPS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", MTP)
def test_multi_token_prediction_is_the_papers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3 (arXiv:2412.19437, equations 21 to 23); the layer is transformers' own, with the added weights."""
    folder = tmp_path / "model"
    write(folder, kind, MTP[kind])
    reference, tensors, prefix = with_predictor(folder)
    layer = reference.model.layers[-1]
    body = streams(folder)
    proposals = Proposals(monkeypatch, HeadDecoder)
    serve(folder, speculative_algorithm="NEXTN", speculative_num_steps=STEPS, prefix_cache="none")
    found = {name.removeprefix(f"{prefix}."): x.float() for name, x in tensors.items() if name.startswith(f"{prefix}.")}
    load_layer(layer, found)
    eps = reference.config.rms_norm_eps
    embedding, output = tensors["model.embed_tokens.weight"].float(), tensors["lm_head.weight"].float()

    def normed(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * found[f"{name}.weight"]

    def step(tokens: list[int], features: list[Tensor]) -> tuple[Tensor, Tensor]:
        e, h = normed(embedding[tokens], "enorm"), normed(torch.stack(features), "hnorm")
        x = run_layer(reference, layer, torch.cat((e, h), -1) @ found["eh_proj.weight"].T)
        return output @ normed(x, "shared_head.norm"), x

    greedy = list(proposals.chains())
    for text, tokens in greedy[: len(greedy) // 2]:
        assert tokens == chain(step, text, body(text[:-1])[-1], STEPS)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_the_predictor_of_a_hybrid_is_a_layer_with_attention(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-Next's ``mtp``: its layer is transformers' own, its last norm's output the next feature. Norms add one."""
    folder = tmp_path / "model"
    write(folder, *ARCHITECTURES[kind])
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = load_file(folder / "model.safetensors")
    config, generator = reference.config, torch.Generator().manual_seed(9)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.1  # noqa: E731
    last = f"model.layers.{config.num_hidden_layers - 1}."
    own = {
        name.replace(last, "mtp.layers.0."): x + draw(*x.shape) for name, x in tensors.items() if name.startswith(last)
    }
    size = config.hidden_size
    own |= {f"mtp.{name}.weight": draw(size) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    own["mtp.fc.weight"] = draw(size, 2 * size)
    save_file({**tensors, **own}, folder / "model.safetensors", {"format": "pt"})

    body = streams(folder)
    proposals = Proposals(monkeypatch, HeadDecoder)
    serve(folder, speculative_algorithm="mtp", speculative_num_steps=STEPS, prefix_cache="none")
    layer = reference.model.layers[-1]
    load_layer(layer, {name.removeprefix("mtp.layers.0."): x for name, x in own.items() if "layers" in name})
    embedding = tensors["model.embed_tokens.weight"].float()
    output = tensors.get("lm_head.weight", embedding).float()

    def normed(x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return scaled * (1 + own[f"mtp.{name}.weight"])

    def step(tokens: list[int], features: list[Tensor]) -> tuple[Tensor, Tensor]:
        e, h = normed(embedding[tokens], "pre_fc_norm_embedding"), normed(torch.stack(features), "pre_fc_norm_hidden")
        x = run_layer(reference, layer, torch.cat((e, h), -1) @ own["mtp.fc.weight"].T)
        feature = normed(x, "norm")
        return output @ feature, feature

    greedy = list(proposals.chains())
    assert len(greedy) > 4
    for text, tokens in greedy[: len(greedy) // 2]:
        assert tokens == chain(step, text, body(text[:-1])[-1], STEPS)[: len(tokens)]


def load_layer(layer: Any, given: dict[str, Tensor]) -> None:
    """Put a checkpoint's tensors into transformers' layer, which keeps a layer's experts in two."""
    names = layer.state_dict()
    own = {name: x for name, x in given.items() if name in names}
    for name in [name for name in names if name not in own]:
        parts = ("gate", "up") if "gate_up" in name else ("down",)
        stem = name.rpartition(".")[0]
        own[name] = torch.stack(
            [
                torch.cat([given[f"{stem}.{i}.{part}_proj.weight"] for part in parts])
                for i in range(names[name].shape[0])
            ]
        )
    layer.load_state_dict(own)


def run_layer(reference: Any, layer: Any, x: Tensor) -> Tensor:
    """The last token's output: [hidden_size]."""
    places = torch.arange(len(x)).unsqueeze(0)
    mask = torch.full((len(x),) * 2, float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        rows = reference.model.rotary_emb(x.unsqueeze(0), places)
        found = layer(x.unsqueeze(0), attention_mask=mask, position_ids=places, position_embeddings=rows)
    return (found[0] if isinstance(found, tuple) else found)[0, -1]


def changed(folder: Path, **keys: Any) -> Path:
    """A head whose config.json says something else."""
    change_config(folder, **keys)
    return folder


@pytest.mark.gate(6)
@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (lambda at: save_eagle(at, vocab_size=400), {"speculative_algorithm": "eagle"}, "a vocabulary of 400"),
        (lambda at: save_eagle(at, num_hidden_layers=2), {"speculative_algorithm": "eagle"}, "of one are read"),
        (lambda at: save_eagle(at, hidden_size=32), {"speculative_algorithm": "eagle"}, "hidden states of 32"),
        (lambda at: save_eagle3(at), {"speculative_algorithm": "eagle"}, "fc.weight"),
        (lambda at: save_eagle(at), {"speculative_algorithm": "eagle3"}, "fc.weight"),
        (lambda at: save_eagle3(at, layers=[0, 1, 9]), {"speculative_algorithm": "eagle3"}, "comes to layer 9"),
        (lambda at: save_eagle3(at, draft_vocab_size=99), {"speculative_algorithm": "eagle3"}, "100"),
        (lambda at: save_medusa(at), {"speculative_algorithm": "eagle"}, "fc.weight"),
        (lambda at: save_medusa(at, 2), {"speculative_algorithm": "mtp"}, "not selected"),
        (lambda at: changed(save_medusa(at), vocab_size=400), {"speculative_algorithm": "medusa"}, "vocabulary of 400"),
        (
            lambda at: changed(save_medusa(at), **{**TINY, "hidden_size": 32}),
            {"speculative_algorithm": "medusa"},
            "states of 32",
        ),
        (
            lambda at: changed(save_medusa(at), medusa_num_heads=4),
            {"speculative_algorithm": "medusa"},
            r"'3\.0\.linear\.weight' is missing",
        ),
        (
            lambda at: changed(save_medusa(at), medusa_num_heads=2),
            {"speculative_algorithm": "medusa"},
            r"belong to no layer of the head .*2\.0\.linear",
        ),
    ],
)
def test_wrong_heads_are_refused(
    make: Callable[[Path], Path], options: dict[str, Any], sentence: str, target: Path, tmp_path: Path
) -> None:
    head = make(tmp_path / "head")
    with pytest.raises(FwkError, match=sentence):
        fwk.LLM(str(target), **{**ENGINE, **options, "speculative_draft_model_path": str(head)})


def test_more_predictors_than_the_checkpoint_has_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "glm4_moe", MTP["glm4_moe"])
    with_predictor(folder)
    changed(folder, num_nextn_predict_layers=2)
    with pytest.raises(ModelLoadError, match=r"num_nextn_predict_layers, but .* no model\.layers\.3\.eh_proj\.weight"):
        fwk.LLM(str(folder), **ENGINE, speculative_algorithm="mtp")


def test_what_is_missing_is_named(target: Path) -> None:
    with pytest.raises(ConfigError, match="no layers for multi-token prediction"):
        fwk.LLM(str(target), **ENGINE, speculative_algorithm="mtp")
    with pytest.raises(ConfigError, match="give --speculative-draft-model-path"):
        fwk.LLM(str(target), **ENGINE, speculative_algorithm="eagle3")
