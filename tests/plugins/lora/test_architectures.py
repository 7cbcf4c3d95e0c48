"""Adapters of all linear layers of every architecture, as peft writes them, against what peft merges of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from tests.helpers.architectures import ARCHITECTURES, close, write
from tests.helpers.checkpoints import reference_logits, token_ids
from tests.helpers.lazy import lazy

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError

lora = lazy("peft.tuners.lora")
peft = lazy("peft")
transformers = lazy("transformers")

REFUSED = ("'target_parameters' is", "which is no linear layer adapters can change")
"""Of adapters of experts' weights, and of gates and routers: parts of what is said."""


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(each, marks=pytest.mark.sweep) for each in ARCHITECTURES if each != "gpt2")]
)
def test_adapters_of_all_linear_layers(name: str, tmp_path: Path) -> None:
    """Merged, as transformers' Mamba asks some layers for their weights alone, and skips what peft adds to them."""
    write(tmp_path / "base", *ARCHITECTURES[name])
    architecture = json.loads((tmp_path / "base" / "config.json").read_text())["architectures"][0]
    network = getattr(transformers, architecture).from_pretrained(tmp_path / "base", dtype=torch.float32)
    prompt = token_ids(30)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of GPT-2's transposed layers
            model = peft.get_peft_model(network, peft.LoraConfig(r=4, target_modules="all-linear"))
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for layer in model.modules():
                    for matrix in (
                        [*layer.lora_A.values(), *layer.lora_B.values()] if isinstance(layer, lora.LoraLayer) else ()
                    ):
                        matrix.weight.normal_(std=0.2, generator=generator)
            model.save_pretrained(tmp_path / "adapter")
            wanted = reference_logits(model.merge_and_unload(), prompt).log_softmax(-1)
    except (ValueError, AttributeError) as error:
        pytest.skip(f"peft has no adapter of it: {error}")
    options = {"dtype": "float32", "max_total_tokens": 1024, "lora_paths": [f"a={tmp_path / 'adapter'}"]}
    try:
        llm = fwk.LLM(str(tmp_path / "base"), enable_lora=True, **options)
    except ConfigError as error:
        if any(text in str(error) for text in REFUSED):
            return
        raise
    with llm:
        [done] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), adapter="a")
    found = torch.tensor([entry.logprob for entry in (done.prompt_logprobs or [])[1:] if entry])
    close(found, wanted[torch.arange(29), torch.tensor(prompt[1:])])
