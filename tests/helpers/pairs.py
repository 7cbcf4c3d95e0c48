"""Features that must compose, each as what it changes: for ``tests/contracts/test_pairs.py``.

A feature that changes what is computed (a model, a weight or K/V format, an adapter, a grammar) belongs to the
reference too: there it is on the plain path (torch attention, one process, no prefix cache, no drafts), with an
adapter merged and quantised weights as the numbers they stand for. A feature that only changes how something is
computed does not.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

import fwk
from fwk import SamplingParams
from fwk.interfaces.multimodal import MediaItem
from fwk.types import Batch, EngineStats, GrammarRequest
from fwk_loaders.gguf.loader import GGUFCheckpoint
from tests.helpers.architectures import GPT_OSS
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.draft_heads import save_eagle3
from tests.helpers.encoded_apart import encoded_apart
from tests.helpers.engine_pair import split
from tests.helpers.gguf_converted import written
from tests.helpers.gguf_families import family_twins
from tests.helpers.images import IMAGE_ID, encoded, noise, write_vision
from tests.helpers.mxfp4 import as_numbers, write_packed
from tests.helpers.quantised import ONLINE, Twins, gguf_of, gguf_twins, round_int4

PREFIX = [(7 * i) % 250 + 20 for i in range(40)]
WITHOUT_IMAGES = [
    [*PREFIX, 60, 61, 62, 63, 64, 65],
    [*PREFIX, 70, 71, 72],
    [5, 6, 7, 8, 9] * 6,
    [100, 101, 102],
]
WITH_IMAGES = [
    [*PREFIX[:20], IMAGE_ID, 60, 61, 62, 63, 64, 65],
    [*PREFIX[:20], IMAGE_ID, 70, 71, 72],
    [5, 6, IMAGE_ID, 7, 8, 9, IMAGE_ID],
    [100, 101, 102],
]
IMAGES = [[1], [1], [2, 1], []]
"""Of each prompt with images: which."""

NUM_PROMPTS = len(WITHOUT_IMAGES)
KNOWN = {token: 20.0 for token in PREFIX}
"""A bias towards tokens that two prompts hold, so that what drafts from the prompt finds something with any weights."""

FILLER = [[(11 * i + k) % 250 + 20 for i in range(90)] for k in range(4)]
"""Prompts that push everybody else's blocks out of a small pool."""

NUM_TOKENS = 10
PATTERN = "[a-f]{2}(, [a-f]{3}){1,8}"
SMALL_POOL = {"max_total_tokens": 104, "page_size": 4}
SMALL_STEPS = {"chunked_prefill_size": 7, "max_prefill_tokens": 24}
BASE = {
    "attention_backend": "torch",
    "operator_backend": "torch",
    "disable_cuda_graph": True,
    "disable_jump_forward": True,
    "prefix_cache": "none",
    "dtype": "float32",
    "max_total_tokens": 2048,
    "page_size": 8,
    "max_running_requests": 16,
    "check_blocks": True,
}
HALF = ["full_attention", "sliding_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"initializer_range": 0.2}),
    "sliding window": ("mistral", {}),
    "MoE": ("qwen3_moe", {"moe_intermediate_size": 128}),
    "MLA": ("deepseek_v2", {"moe_intermediate_size": 128, "v_head_dim": 32, "kv_lora_rank": 64}),
    "sliding window + MoE": (
        "qwen3_moe",
        {"moe_intermediate_size": 128, "sliding_window": 24, "use_sliding_window": True},
    ),
    "window groups": ("qwen3", {"sliding_window": 24, "use_sliding_window": True, "layer_types": HALF}),
    "MXFP4 experts": ("gpt_oss", {**GPT_OSS, "hidden_size": 128, "head_dim": 32, "intermediate_size": 128}),
    "state group": ("lfm2", {}),
    "state group + MoE": ("qwen3_next", {}),
    "images": ("idefics3", {}),
    "window groups + MoE": (
        "qwen3_moe",
        {"moe_intermediate_size": 128, "sliding_window": 24, "use_sliding_window": True, "layer_types": HALF},
    ),
}


@dataclass
class Run:
    """What a server made of the workload."""

    tokens: list[list[int]]
    texts: list[str]
    logprobs: list[list[float]]
    prompt_logprobs: list[list[float]]
    cached: list[int]
    stats: EngineStats
    chosen: dict[str, str]
    batches: list[Batch]
    keeps_states: bool = False
    hidden_states: list[list[np.ndarray]] = field(default_factory=list[list[np.ndarray]])  # of each token of each


@dataclass(frozen=True)
class Feature:
    """options: of the server. shared: options the reference has too. sampling: of every request that can have it.

    n: sequences of each request. kind, weights, adapter, drafts, head: what the model is made of, whether a LoRA
    adapter is asked for, and whether a draft model or a head that drafts is needed. proof: shows that the
    feature took part.
    """

    name: str
    proof: Callable[[Run], bool]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    shared: dict[str, Any] = field(default_factory=dict[str, Any])
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    n: int = 1
    kind: str = ""
    weights: str = ""
    adapter: bool = False
    drafts: bool = False
    head: bool = False


def _chose(family: str, name: str) -> Callable[[Run], bool]:
    return lambda run: run.chosen.get(family) == name


def _tried_to_capture(run: Run) -> bool:
    """The step was captured, or it is said which operator stands against it."""
    how = run.chosen["step"]
    reasons = (
        "which a recorded step cannot hold", "ranks add up", "stages hand", "the model does not generate",
        "recurrent layers", "attention backends of their own",
    )  # fmt: skip
    return how == "captured" or any(reason in how for reason in reasons)


def _has_groups(run: Run) -> bool:
    """The layers had two block tables, or one because something else moves blocks that knows of one only."""
    had = any(s.new_window_block_ids for batch in run.batches for s in batch.sequences)
    return had != (run.chosen["cache"] == "hierarchical" or "kv_transfer" in run.chosen or _is_in_stages(run))


def _is_in_stages(run: Run) -> bool:
    """The model's layers are divided: layers then share one block table, and no text is forced."""
    return "stages" in run.chosen


def _quantised(method: str, **options: Any) -> Feature:
    return Feature(
        method,
        lambda run: method in run.chosen["quant"],
        options={"quantization": method, **options},
        weights=method,
    )


ELSEWHERE = "prefill_elsewhere"
"""No option: another engine computes prompts, and this one fetches their K/V."""

ENCODED_APART = "encoded_apart"
"""No option: the engine has no encoder, and a worker alongside encodes."""

FEATURES = [
    Feature("chunked prefill", lambda run: any(not s.samples for b in run.batches for s in b.sequences), SMALL_STEPS),
    Feature("cached prefix", lambda run: max(run.cached) > 0, {"prefix_cache": "radix"}),
    Feature("pre-emption", lambda run: run.stats.preemptions > 0, SMALL_POOL, sampling={"max_tokens": 40}),
    Feature(
        "n-gram",
        lambda run: run.stats.draft_tokens > 0,
        {"speculative_algorithm": "ngram"},
        sampling={"logit_bias": KNOWN},
    ),
    Feature(
        "draft model", lambda run: run.stats.draft_tokens > 0, {"speculative_algorithm": "standalone"}, drafts=True
    ),
    Feature(
        "tree",
        lambda run: run.stats.draft_tokens > 0,
        {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3},
        sampling={"logit_bias": KNOWN},
    ),
    Feature(
        "suffix",
        lambda run: run.stats.draft_tokens > 0,
        {"speculative_algorithm": "suffix"},
        sampling={"logit_bias": KNOWN},
    ),
    Feature(
        "EAGLE-3",
        lambda run: run.stats.draft_tokens > 0,
        {"speculative_algorithm": "eagle3", "speculative_eagle_topk": 2, "speculative_num_steps": 3},
        head=True,
    ),
    Feature("LoRA", lambda run: True, adapter=True),
    _quantised("int8"),
    _quantised("int4", int4_group_size=32),
    _quantised("fp8"),
    _quantised("fp4"),
    _quantised("gguf"),
    Feature("int8 KV", lambda run: True, shared={"kv_cache_dtype": "int8"}),
    Feature("fp8 KV", lambda run: True, shared={"kv_cache_dtype": "fp8_e4m3"}),
    Feature("sliding window", lambda run: True, kind="sliding window"),
    Feature("window groups", _has_groups, kind="window groups"),
    Feature("state group", lambda run: run.keeps_states, kind="state group"),
    Feature("MoE", lambda run: "moe" in run.chosen, kind="MoE"),
    Feature("MLA", lambda run: True, kind="MLA"),
    Feature("MXFP4 experts", lambda run: "moe" in run.chosen, kind="MXFP4 experts"),
    Feature(
        "grammar",
        lambda run: all(re.fullmatch(PATTERN, text) or len(text) >= NUM_TOKENS for text in run.texts),
        sampling={"grammar": GrammarRequest("regex", PATTERN)},
    ),
    Feature(
        "forced tokens",
        lambda run: (run.stats.accepted_draft_tokens > 0) != _is_in_stages(run),
        {"disable_jump_forward": False},
        sampling={"grammar": GrammarRequest("regex", PATTERN)},
    ),
    Feature(
        "logprobs",
        lambda run: bool(run.logprobs[0] and run.prompt_logprobs[0]),
        sampling={"logprobs": 2, "prompt_logprobs": 1},
    ),
    Feature(
        "hidden states",
        lambda run: bool(run.hidden_states[0]) and all(np.isfinite(x).all() for x in run.hidden_states[0]),
        shared={"enable_return_hidden_states": True},
        sampling={"return_hidden_states": True},
    ),
    Feature(
        "rerank",
        lambda run: bool(run.logprobs[0]) and not run.tokens,
        shared={"task": "classify", "classifier_from_token": ["a", "b"]},
    ),
    Feature("n > 1", lambda run: len(run.tokens) == 3 * NUM_PROMPTS, n=3),
    Feature(
        "hierarchical cache",
        lambda run: run.stats.restored_prompt_tokens > 0,
        {"prefix_cache": "hierarchical", "hicache_ratio": 20.0, **SMALL_POOL},
    ),
    Feature("tensor parallel", _chose("executors", "processes"), {"executor": "processes", "tensor_parallel_size": 2}),
    Feature(
        "pipeline parallel",
        _is_in_stages,
        {"executor": "processes", "pipeline_parallel_size": 2},
    ),
    Feature(
        "expert parallel",
        lambda run: run.chosen["executors"] == "processes" and "moe" in run.chosen,
        {"executor": "processes", "tensor_parallel_size": 2, "expert_parallel_size": 2},
        kind="MoE",
    ),
    Feature(
        "moving experts",
        _chose("expert_placers", "deepseek"),
        {
            "executor": "processes",
            "tensor_parallel_size": 2,
            "expert_parallel_size": 2,
            "ep_num_redundant_experts": 2,
            "enable_eplb": True,
            "eplb_rebalance_num_iterations": 2,
        },
        kind="MoE",
    ),
    Feature(
        "prefill elsewhere",
        lambda run: run.stats.features["remote_prefill"]["kv_transfers"] > 0,
        {"prefix_cache": "radix", ELSEWHERE: True},
    ),
    Feature("overlap", _chose("executors", "threaded"), {"executor": "threaded"}),
    Feature(
        "recorded step",
        _tried_to_capture,
        {"attention_backend": "auto", "operator_backend": "auto", "disable_cuda_graph": False},
    ),
    Feature("triton attention", _chose("attention", "triton"), {"attention_backend": "triton"}),
    Feature(
        "two attention backends",
        _chose("attention", "cpu-prefill.torch-decode"),
        {"prefill_attention_backend": "cpu", "decode_attention_backend": "torch"},
    ),
    Feature(
        "double sparsity",  # of all tokens, so that none is left out
        _chose("attention", "double_sparsity"),
        {
            "attention_backend": "double_sparsity",
            "ds_channel_config_path": str(Path(__file__).parents[1] / "contracts/heavy_channels.json"),
            "ds_heavy_channel_num": 8,
            "ds_heavy_token_num": 10_000,
            "ds_sparse_decode_threshold": 0,
        },
    ),
    Feature(
        "images",
        lambda run: any("media" in new.features for batch in run.batches for new in batch.new) or not run.tokens,
        shared={"mm_processor_kwargs": '{"do_image_splitting": false}'},
        kind="images",
    ),
    Feature(
        "images encoded apart",
        lambda run: any("media" in new.features for batch in run.batches for new in batch.new) or not run.tokens,
        {ENCODED_APART: True},
        shared={"mm_processor_kwargs": '{"do_image_splitting": false}'},
        kind="images",
    ),
]
BY_NAME = {feature.name: feature for feature in FEATURES}
TEXT_ONLY = (
    "gguf", "sliding window", "window groups", "state group", "MoE", "MLA", "MXFP4 experts", "expert parallel",
    "moving experts",
)  # fmt: skip
NO_MODEL = (
    ("state group", "MLA"),
    ("state group", "MXFP4 experts"),
    ("MLA", "MXFP4 experts"),
    *((name, "images") for name in TEXT_ONLY),
    *((name, "images encoded apart") for name in TEXT_ONLY),
)
"""No model that is served has both."""
PAIRS = [pair for pair in combinations(BY_NAME, 2) if pair not in NO_MODEL]


class Places:
    """Checkpoints for all combinations, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.checkpoint = cache(self._checkpoint)
        self.gguf = cache(self._gguf)
        self.draft_model = cache(self._draft_model)
        self.head = cache(self._head)
        self.adapter = cache(self._adapter)

    def _checkpoint(self, kind: str, rounding: tuple[tuple[str, str], ...], merged: bool) -> Path:
        """A folder with the numbers that ``rounding`` ((name pattern, method), the first that matches) leaves.

        merged: with the adapter added to them.
        """
        if not rounding and not merged:
            name, changes = KINDS[kind]
            folder = self._root / kind
            makers = {"gpt_oss": write_packed, "idefics3": write_vision}
            make = makers.get(name) or partial(make_checkpoint, kind=name)
            make(folder, **changes)
            return folder
        if rounding and rounding[-1] == ("", "gguf"):
            source, rounding = self.gguf(gguf_kind(kind)).plain, rounding[:-1]
        else:
            source = self.checkpoint(kind, (), False)
        folder = self._root / f"{kind}-{'+'.join(f'{p}={m}' for p, m in rounding) or source.name}-{merged}"
        folder.mkdir()
        for file in source.iterdir():
            if file.suffix == ".json":
                (folder / file.name).write_bytes(file.read_bytes())
        tensors = load_file(source / "model.safetensors")
        _round_all(tensors, rounding)
        if merged:
            for name, delta in _adapter_deltas(tensors).items():
                tensors[name] = tensors[name] + delta
        save_file(tensors, folder / "model.safetensors")
        return folder

    def _gguf(self, kind: str) -> Twins:
        """A file of Q8_0, and what it holds."""
        if kind == "llama":
            return gguf_twins("Q8_0", self._root / "gguf")
        if kind in FAMILIES:
            return family_twins(self.checkpoint(kind, (), False), self._root / f"gguf of {kind}")
        if kind in STATES:
            return self._converted(self.checkpoint(kind, (), False), self._root / f"gguf of {kind}", STATES[kind])
        return gguf_of(self.checkpoint(kind, (), False), self._root / "gguf of experts")

    def _converted(self, source: Path, folder: Path, architecture: str) -> Twins:
        """As llama.cpp's converter writes it, in Q8_0, and the numbers that the file holds."""
        shutil.copytree(source, folder / "plain")
        path = written(source, folder / "model.gguf", architecture, quantises="Q8_0")
        weights, file = GGUFCheckpoint(path).weights(), folder / "plain" / "model.safetensors"
        held = {name: weights.tensor(name, tuple(x.shape)).float() for name, x in load_file(file).items()}
        save_file({name: x.contiguous() for name, x in held.items()}, file)
        return Twins("gguf", path, {"quantization": "gguf", "dtype": "float32"}, folder / "plain")

    def _draft_model(self) -> Path:
        """A smaller model of the same vocabulary."""
        folder = self._root / "draft"
        make_checkpoint(folder, "llama", num_hidden_layers=1)
        return folder

    def _head(self, hidden_size: int) -> Path:
        """A head that drafts, for models of a size."""
        return save_eagle3(self._root / f"head-{hidden_size}", size=hidden_size)

    def _adapter(self, base: Path) -> Path:
        """A PEFT adapter for a checkpoint, on what every kind has."""
        folder = self._root / f"{base.parent.name}-{base.name}-adapter"
        folder.mkdir()
        tensors = load_file(base / "model.safetensors")
        found: dict[str, torch.Tensor] = {}
        for name in _adapted(tensors):
            a, b = _adapter_parts(name, tensors[name].shape)
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{stem}.lora_A.weight"], found[f"{stem}.lora_B.weight"] = a, b
        save_file(found, folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(ADAPTED)}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        return folder


FAMILIES = ("MLA", "MXFP4 experts")
"""Kinds that llama.cpp's converter writes in a way of their own."""


STATES = {"state group": "lfm2", "state group + MoE": "qwen3next"}
"""Kinds with recurrent layers, and what files call them."""


def gguf_kind(kind: str) -> str:
    """What of a kind is in a GGUF file."""
    return kind if kind in FAMILIES or kind in STATES else "MoE" if "MoE" in kind else "llama"


WINDOWED = ("sliding window", "window groups")
LINEAR = (
    "_proj.weight", "_proj_with_mqa.weight", "lm_head.weight", ".w1.weight", ".w2.weight", ".w3.weight",
    "in_proj_qkvz.weight", "in_proj_ba.weight", ".fc1.weight", ".fc2.weight", ".proj.weight",
)  # fmt: skip
GROUP = 32
ADAPTED = ("q_proj", "o_proj")
RANK = 4


def _round_all(tensors: dict[str, torch.Tensor], rounding: tuple[tuple[str, str], ...]) -> None:
    """Put in place of the weights the numbers that are left of them."""
    for name, x in list(tensors.items()):
        method = next((m for pattern, m in rounding if pattern in name), None)
        if method is not None and name.endswith(LINEAR) and "kv_b_proj" not in name:  # absorbed: stays plain
            tensors[name] = _rounded(x, method)
        elif method is not None and name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            numbers = as_numbers(tensors, stem)
            tensors[stem] = numbers if method == "fp4" else _rounded_experts(stem, numbers, method)  # its own blocks
        elif method is not None and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors[name] = _rounded_experts(name, x, method)


def _rounded_experts(name: str, numbers: torch.Tensor, method: str) -> torch.Tensor:
    """[num_experts, in, out], changed in place: each expert's matrices rounded."""
    step = 2 if "gate_up" in name else 1  # gate and up in turns, each a matrix of its own
    for expert in numbers:
        for first in range(step):
            expert[:, first::step] = _rounded(expert[:, first::step].t().contiguous(), method).t()
    return numbers


def _rounded(x: torch.Tensor, method: str) -> torch.Tensor:
    """[out, in] as the numbers that a method leaves of them."""
    rounded = round_int4(x.numpy(), GROUP) if method == "int4" else ONLINE[method](x.numpy())
    return torch.from_numpy(np.asarray(rounded, np.float32))


def _adapted(tensors: dict[str, torch.Tensor]) -> list[str]:
    targets = tuple(f"{target}.weight" for target in ADAPTED)
    return sorted(name for name in tensors if name.endswith(targets) and "vision_model" not in name)


def _adapter_parts(name: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [out, rank], the same for the same layer."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    draw = lambda *size: torch.randn(size, generator=generator) * 0.2  # noqa: E731
    return draw(RANK, shape[1]), draw(shape[0], RANK)


def _adapter_deltas(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the adapter adds to each weight (Hu et al. 2021): alpha / rank * B A."""
    parts = {name: _adapter_parts(name, tensors[name].shape) for name in _adapted(tensors)}
    return {name: 2.0 * (b @ a) for name, (a, b) in parts.items()}


@dataclass
class Setting:
    """A combination of features as a server and its requests."""

    features: list[Feature]

    def __post_init__(self) -> None:
        self.features.sort(key=FEATURES.index)

    @property
    def has_gguf(self) -> bool:
        return any(feature.weights == "gguf" for feature in self.features)

    @property
    def kind(self) -> str:
        kinds = {feature.kind for feature in self.features if feature.kind}
        if "MXFP4 experts" in kinds:
            return "MXFP4 experts"  # gpt-oss, half of whose layers have a window
        if kinds == {"MoE", "MLA"}:
            return "MLA"  # this kind has experts
        if "state group" in kinds and kinds & set(WINDOWED):
            return "state group"  # with a window asked of it, see options
        if "MLA" not in kinds and len(kinds) > 1:
            return " + ".join(sorted(kinds - {"sliding window"} if "window groups" in kinds else kinds, reverse=True))
        if len(kinds) > 1:
            return "MLA"  # with a window asked of it, see options
        return kinds.pop() if kinds else "llama"

    @property
    def gguf_kind(self) -> str:
        """What of its kind is in a GGUF file."""
        return gguf_kind(self.kind)

    @property
    def wants_window(self) -> bool:
        """Of a model that has none."""
        kinds = {feature.kind for feature in self.features}
        return bool(kinds & {"MLA", "state group"} and kinds & set(WINDOWED))

    @property
    def rounding(self) -> tuple[tuple[str, str], ...]:
        """Which weights each method rounds: a second one takes the feed-forward layers."""
        methods = [feature.weights for feature in self.features if feature.weights]
        methods.sort(key=lambda method: method != "gguf")
        if len(methods) > 1:
            return (("feed_forward" if self.kind == "state group" else "mlp", methods[1]), ("", methods[0]))
        return (("", methods[0]),) if methods else ()

    @property
    def has_adapter(self) -> bool:
        return any(feature.adapter for feature in self.features)

    def shared(self) -> dict[str, Any]:
        """Options of the reference and of the combination."""
        found: dict[str, Any] = {}
        for feature in self.features:
            found |= feature.shared
        if self.has_gguf and self.kind.startswith(WINDOWED):  # the format has no such model: ask for the window
            asked: dict[str, Any] = {"sliding_window": 24, "use_sliding_window": True}
            if "MoE" not in self.kind:
                asked["architectures"] = ["MistralForCausalLM"]
            if "window groups" in self.kind:  # Llama's shape, with kinds of layers
                turns = {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1] * len(HALF)}
                asked |= {"layer_types": HALF, **turns}
            found["json_model_override_args"] = json.dumps(asked)
        return found

    def sampling(self) -> list[SamplingParams]:
        """Of each prompt. What tells of prompts computes them whole: two ask for none, to use the prefix cache."""
        found: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
        for feature in self.features:
            found |= feature.sampling
        of_prompts = ("prompt_logprobs", "return_hidden_states")
        second = {name: value for name, value in found.items() if name not in of_prompts}
        return [SamplingParams(**(second if i in (1, 2) else found)) for i in range(NUM_PROMPTS)]

    @property
    def prompts(self) -> list[list[int]]:
        return WITH_IMAGES if self.kind == "images" else WITHOUT_IMAGES

    @property
    def media(self) -> list[list[MediaItem]]:
        """Of each prompt; none where there are no images."""
        if self.kind != "images":
            return []
        return [[MediaItem("image", encoded(noise(seed))) for seed in seeds] for seeds in IMAGES]

    @property
    def n(self) -> int:
        return max((feature.n for feature in self.features), default=1)

    def options(self, places: Places) -> tuple[Path, dict[str, Any]]:
        """The model and the options of the combination."""
        found: dict[str, Any] = {}
        for feature in self.features:
            for name, value in feature.options.items():
                is_both = found.get(name) == "hierarchical" and name == "prefix_cache"  # which is a radix cache, too
                found[name] = "hierarchical" if is_both else value
            if feature.drafts:
                found["speculative_draft_model_path"] = str(places.draft_model())
        model = places.checkpoint(self.kind, (), False)
        rounding = self.rounding
        if self.has_gguf:
            model = places.gguf(self.gguf_kind).path
        if len(rounding) > 1:
            place, method = rounding[0]
            found |= {"quantization": rounding[1][1], "quantization_layers": [f"*{place}*={method}"]}
        if self.wants_window:
            found["json_model_override_args"] = '{"sliding_window": 24}'
        if any(feature.head for feature in self.features):
            folder = places.gguf(self.gguf_kind).plain if self.has_gguf else places.checkpoint(self.kind, (), False)
            config = json.loads((folder / "config.json").read_text())
            size = config.get("text_config", config)["hidden_size"]
            found["speculative_draft_model_path"] = str(places.head(size))
        if self.has_adapter:
            base = places.gguf(self.gguf_kind).plain if self.has_gguf else places.checkpoint(self.kind, (), False)
            found |= {"enable_lora": True, "lora_paths": [f"tiny={places.adapter(base)}"]}
        return model, {**BASE, **self.shared(), **found}

    def reference(self, places: Places) -> tuple[Path, dict[str, Any]]:
        """The plain path with the same weights."""
        return places.checkpoint(self.kind, self.rounding, self.has_adapter), {
            **BASE,
            **self.shared(),
            "disable_hybrid_swa_memory": True,
        }


def serve(model: Path, options: dict[str, Any], setting: Setting, adapter: str = "") -> Run:
    """Run the workload; with a prefix cache a second time, after other prompts. Raises what refuses the combination."""
    with _engines(model, options) as (llm, *others):
        batches: list[Batch] = []

        def watched(launch: Callable[[Batch], Any], batch: Batch) -> Any:
            batches.append(batch)
            return launch(batch)

        for engine in (llm.engine, *others):
            engine.executor.launch = partial(watched, engine.executor.launch)  # type: ignore[method-assign]
        given: dict[str, Any] = {"adapter": adapter} if adapter else {}
        given |= {"media": setting.media, "n": setting.n}
        if options.get("task") == "classify" and not any(f.sampling or f.n > 1 for f in setting.features):
            return _scores(llm, options, batches)
        sampling, plain = setting.sampling(), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        done, cached = llm.generate(setting.prompts, sampling, **given), [0]
        if options["prefix_cache"] != "none":
            llm.generate(FILLER if options["prefix_cache"] == "hierarchical" else FILLER[:1], plain)
            again = llm.generate(setting.prompts, sampling, **given)
            assert [x.token_ids for x in again] == [x.token_ids for x in done]
            cached = [x.cached_tokens for x in again]
        stats = llm.engine.stats()
        restored = sum(engine.stats().restored_prompt_tokens for engine in (llm.engine, *others))
        stats = msgspec.structs.replace(stats, restored_prompt_tokens=restored)
        assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)
        llm.engine.scheduler.check()
        return Run(
            tokens=[x.token_ids for x in done],
            texts=[x.text for x in done],
            logprobs=[[entry.logprob for entry in x.logprobs or []] for x in done],
            prompt_logprobs=[[entry.logprob for entry in (x.prompt_logprobs or []) if entry] for x in done],
            cached=cached,
            stats=stats,
            chosen=dict(llm.engine.info.chosen),
            batches=batches,
            keeps_states=llm.engine.scheduler.limits.num_state_places is not None,
            hidden_states=[[np.frombuffer(one, "<f4") for one in x.hidden_states or []] for x in done],
        )


@contextmanager
def _engines(model: Path, options: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The ``LLM`` of a combination, and the engine that computes its prompts if they are computed elsewhere."""
    given = {name: value for name, value in options.items() if name not in (ELSEWHERE, ENCODED_APART)}
    if ELSEWHERE not in options and ENCODED_APART in options:
        with tempfile.TemporaryDirectory() as folder, encoded_apart(model, Path(folder), **given) as (llm, _):
            yield (llm,)
        return
    if ELSEWHERE not in options:
        with fwk.LLM(str(model), **given) as llm:
            yield (llm,)
        return
    # Room for all that is offered at once: nothing of it is read before all prompts were added.
    there: dict[str, Any] = {"max_total_tokens": 400} if given["prefix_cache"] == "hierarchical" else {}
    if "tensor_parallel_size" in given and "expert_parallel_size" not in given:  # heads are cut for ranks here alone
        there |= {"tensor_parallel_size": 1, "executor": "inprocess"}
    with tempfile.TemporaryDirectory() as folder, split(str(model), Path(folder), there, **given) as (llm, pair):
        yield llm, pair.prefill


def _scores(llm: fwk.LLM, options: dict[str, Any], batches: list[Batch]) -> Run:
    """The same of a model that scores prompts: its scores stand for log-probabilities."""
    scores = llm.classify(WITHOUT_IMAGES)
    cached = 0
    if options["prefix_cache"] != "none":
        llm.classify(FILLER if options["prefix_cache"] == "hierarchical" else FILLER[:1])
        before = llm.engine.stats().cached_prompt_tokens
        assert np.allclose(llm.classify(WITHOUT_IMAGES), scores, atol=2e-3)
        cached = llm.engine.stats().cached_prompt_tokens - before
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)
    llm.engine.scheduler.check()
    chosen = dict(llm.engine.info.chosen)
    states = llm.engine.scheduler.limits.num_state_places is not None
    return Run([], [], scores.tolist(), [], [cached], stats, chosen, batches, states)


def exclusive(features: Sequence[Feature]) -> tuple[str, str, str] | None:
    """An option for which the features want different values, and the two; None when there is no such option."""
    one, other = features
    given = [{**feature.shared, **feature.options} for feature in (one, other)]
    for name in ("speculative_algorithm", "kv_cache_dtype", "attention_backend"):
        values = [options.get(name) for options in given]
        if None not in values and values[0] != values[1]:
            return name, str(values[0]), str(values[1])
    return None
