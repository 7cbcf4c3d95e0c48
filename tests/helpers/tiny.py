"""Engines in this process on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk_kit.testing.serving import TINY


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a config.json, for the dummy loader."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="module")
def tiny_llm(tiny_folder: Path) -> Iterator[Callable[..., fwk.LLM]]:
    """Makes engines on the tiny random model; one per set of options."""
    made: dict[str, fwk.LLM] = {}

    def make(**options: Any) -> fwk.LLM:
        key = repr(sorted(options.items()))
        if key not in made:
            settings = {"max_total_tokens": 4096, "max_running_requests": 32, "check_blocks": True, **options}
            made[key] = fwk.LLM(str(tiny_folder), load_format="dummy", **settings)
        return made[key]

    yield make
    for llm in made.values():
        llm.close()


def routed_in_float32(mixture: dict[str, Any]) -> dict[str, Any]:
    """A mixture's config.json as GLM 4.5's, whose router computes in float32."""
    return {
        **{name: value for name, value in mixture.items() if name not in ("num_experts", "norm_topk_prob")},
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": mixture["num_experts"],
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
    }


def save_llama(folder: Path, *, seed: int = 0, noise: float = 0.0, **changes: Any) -> Path:
    """A tiny random Llama as a checkpoint with safetensors and the byte tokeniser.

    noise: standard deviation of what is added to each weight of ``seed``'s model, for a draft model that often agrees.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fwk_loaders.dummy.loader import DummyCheckpoint

    settings = {key: value for key, value in TINY.items() if key not in ("architectures", "dtype")}
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, "initializer_range": 0.15, **changes}))
    with torch.no_grad():
        for weight in model.parameters() if noise else ():
            weight += noise * torch.randn_like(weight)
    model.save_pretrained(folder)
    DummyCheckpoint(folder).tokenizer().save(str(folder / "tokenizer.json"))
    return folder
