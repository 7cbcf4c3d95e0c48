"""Adapters of the text of models that see, under all names that releases of transformers give its layers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.lazy import lazy
from tests.helpers.seeing import SEEING

import fwk
from fwk import SamplingParams
from fwk.errors import InvalidRequest

peft = lazy("peft")
lora = lazy("peft.tuners.lora")

PROMPT = [5, 6, 7, 200, 41, 9]
COUNT = 6
TARGETS = r".*(language_model|text_model)\..*(q_proj|v_proj|o_proj|up_proj|down_proj)"
ROOTS = ("model.", "model.language_model.", "language_model.model.", "model.text_model.", "model.language_model.model.")
GATED = ("qwen2_5_vl", "gemma3")


def adapted(model: Any, folder: Path) -> Any:
    """The model with a random adapter of its text, as peft computes it, and as peft saves it into ``folder``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS)
        found = peft.get_peft_model(model, config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in found.modules():
                if isinstance(layer, lora.LoraLayer):
                    for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                        part.weight.normal_(std=0.2, generator=generator)
        found.save_pretrained(folder)
    return found


def greedy(model: Any) -> list[int]:
    """What transformers says to text alone, without a cache."""
    ids = list(PROMPT)
    for _ in range(COUNT):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def renamed(folder: Path, target: Path, root: str) -> None:
    """The same adapter, whose layers' names begin otherwise."""
    target.mkdir()
    (target / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    tensors = load_file(folder / "adapter_model.safetensors")
    names = {name: f"base_model.model.{root}layers.{name.partition('.layers.')[2]}" for name in tensors}
    save_file({names[name]: x for name, x in tensors.items()}, target / "adapter_model.safetensors")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.sweep] * (n not in GATED)) for n in SEEING])
def test_adapters_load_under_every_name(name: str, tmp_path: Path) -> None:
    base, own = tmp_path / "base", tmp_path / "own"
    base.mkdir()
    model = SEEING[name].write(base)
    plain = greedy(model)
    wanted = greedy(adapted(model, own))
    assert wanted != plain
    for i, root in enumerate(ROOTS):
        renamed(own, tmp_path / str(i), root)
    paths = [f"own={own}", *(f"{i}={tmp_path / str(i)}" for i in range(len(ROOTS)))]
    sampling = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 1024, "max_loras_per_batch": len(paths)}
    with fwk.LLM(str(base), enable_lora=True, lora_paths=paths, **options) as llm:
        assert llm.generate([PROMPT], sampling)[0].token_ids == plain
        for path in paths:
            [found] = llm.generate([PROMPT], sampling, adapter=path.partition("=")[0])
            assert found.token_ids == wanted, path


@pytest.mark.parametrize(
    ("root", "why"),
    [
        ("vision_tower.", "it changes vision_tower.layers.0"),
        ("model.visual.", "it changes model.visual.layers.0"),
        ("model.language_model.encoder.", "which this model does not have"),
    ],
)
def test_encoders_are_not_taken_for_the_text(root: str, why: str, tmp_path: Path) -> None:
    base, own = tmp_path / "base", tmp_path / "own"
    base.mkdir()
    adapted(SEEING["qwen2_5_vl"].write(base), own)
    renamed(own, tmp_path / "other", root)
    with pytest.raises((fwk.errors.FwkError, InvalidRequest), match=why):
        fwk.LLM(str(base), dtype="float32", enable_lora=True, lora_paths=[f"a={tmp_path / 'other'}"])
