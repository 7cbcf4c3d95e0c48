"""What a CPU says of the small models, in float32: tokens, and the log-probabilities of the likeliest at each place."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fwk
from benchmarks.gpu.cases import MODELS, WORKS, Work, file_of, references
from fwk import SamplingParams

TOP = 8
"""Tokens whose log-probabilities are kept at each place."""
EXACT: dict[str, Any] = {
    "attention_backend": "torch",
    "operator_backend": "torch",
    "sampling_backend": "torch",
    "dtype": "float32",
}


def prompts(config: dict[str, Any], work: Work, seed: int) -> list[list[int]]:
    """Random tokens, the same everywhere."""
    random = np.random.default_rng(seed)
    return random.integers(3, config["vocab_size"] - 1, (work.num_seqs, work.num_prompt)).tolist()


def saved(config: dict[str, Any], folder: Path) -> Path:
    """A folder with the configuration of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def options_of(work: Work, options: dict[str, Any]) -> dict[str, Any]:
    """Of ``fwk.LLM``: random weights, and a cache that holds windows of all tokens at once."""
    count = work.num_seqs * (1 + work.num_tokens // WINDOW)
    room = count * (work.num_prompt + work.num_tokens + 64)
    settings = {"load_format": "dummy", "max_total_tokens": room, "max_running_requests": max(count, 8)}
    return {**settings, "prefix_cache": "none", **options}


WINDOW = 4
"""Tokens that are generated after each beginning of the reference's."""


def write_all(folder: Path, models: dict[str, dict[str, Any]] = MODELS, works: dict[str, Work] = WORKS) -> list[Path]:
    """All references, which take a CPU some minutes."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    for model, work, seed, coarse in references():
        path = file_of(folder, model, work, seed, coarse)
        config, asked = models[model], works[work]
        more = {"quantization": coarse} if coarse else {}
        with tempfile.TemporaryDirectory() as where:
            options = options_of(asked, EXACT | more)
            with fwk.LLM(str(saved(config, Path(where) / model)), device="cpu", **options) as llm:
                sampling = SamplingParams(max_tokens=asked.num_tokens, temperature=0.0, logprobs=TOP, ignore_eos=True)
                done = llm.generate(prompts(config, asked, seed), sampling)
        tops = [[sorted(token.top, key=lambda pair: -pair[1])[:TOP] for token in one.logprobs or []] for one in done]
        np.savez_compressed(
            path,
            tokens=np.array([one.token_ids for one in done], np.int32),
            ids=np.array([[[i for i, _ in top] for top in rows] for rows in tops], np.int32),
            logprobs=np.array([[[x for _, x in top] for top in rows] for rows in tops], np.float32),
        )
        found.append(path)
    return found


class Reference:
    """tokens: [num_seqs, num_tokens]; ids, logprobs: [num_seqs, num_tokens, TOP], the likeliest first."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there: run --stage references on a CPU, and bring the folder")
        with np.load(path) as arrays:
            self.tokens, self.ids, self.logprobs = (arrays[name] for name in ("tokens", "ids", "logprobs"))

    def windows(self, beginnings: Sequence[list[int]]) -> list[tuple[int, int, list[int]]]:
        """(sequence, first token, prompt) of each window: the reference's tokens up to it are given."""
        starts = range(0, self.tokens.shape[1], WINDOW)
        return [
            (i, at, [*beginnings[i], *self.tokens[i, :at].tolist()]) for i in range(len(beginnings)) for at in starts
        ]

    def difference(self, sequence: int, at: int, token: int, logprob: float) -> float:
        """Between the log-probabilities of a token there; of one that is none of the likeliest, infinite."""
        known = dict(zip(self.ids[sequence, at].tolist(), self.logprobs[sequence, at].tolist(), strict=True))
        return abs(known[token] - logprob) if token in known else float("inf")

    def doubt(self, sequence: int, at: int, token: int) -> float:
        """How much less likely the CPU thought a token than its own."""
        known = dict(zip(self.ids[sequence, at].tolist(), self.logprobs[sequence, at].tolist(), strict=True))
        return float(self.logprobs[sequence, at, 0]) - known.get(token, float("-inf"))
