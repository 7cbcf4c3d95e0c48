"""An attention backend that is asked for by name computes the model that is served without, or says what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.architectures import ARCHITECTURES, VARIANTS, write

import fwk
from fwk import SamplingParams
from fwk.errors import FwkError
from fwk.plugins import discover

PROMPT = [(i * 37 + 11) % 300 for i in range(45)]
ASKED = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)
BACKENDS = sorted(item.name for item in discover().family("attention") if item.name != "triton")  # interpreted: minutes
EVERY = {**ARCHITECTURES, **VARIANTS}


def asked(folder: Path, backend: str) -> tuple[dict[str, str], dict[int, float]] | str:
    """What was chosen, and the next token's log-probabilities; or why the backend refuses."""
    options = {"dtype": "float32", "max_total_tokens": 512, "max_running_requests": 2, "prefix_cache": "none"}
    try:
        with fwk.LLM(str(folder), attention_backend=backend, **options) as llm:
            [position] = llm.generate([PROMPT], ASKED)[0].logprobs or []
            return dict(llm.engine.info.chosen), dict(position.top)
    except FwkError as error:
        return str(error)


@pytest.mark.sweep
@pytest.mark.parametrize("name", EVERY)
def test_one_that_is_named_is_that_one_or_refuses(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, *EVERY[name])
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)
    served = ""
    for backend in ("auto", *BACKENDS):
        answer = asked(tmp_path, backend)
        if isinstance(answer, str):
            assert backend in answer or "--ds-channel-config-path" in answer, f"{backend}: {answer}"
            continue
        chosen, logprobs = answer
        served = served or chosen["models"]
        assert chosen["models"] == served, f"{backend} computes another model"
        assert chosen.get("attention", "none") in ({backend, "none"} if backend != "auto" else {*BACKENDS, "none"})
        for token, logprob in logprobs.items():
            assert abs(logprob - float(wanted[token])) < 2e-3, backend
