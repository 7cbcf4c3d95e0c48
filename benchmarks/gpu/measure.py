"""One case: compare with the CPU, or take the time.

    python -m benchmarks.gpu.measure CASE.json RESULT.json DEVICE

``CASE.json`` is a ``Case``; the result is written when it is known, so that whoever ends the process loses this one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import fwk
from benchmarks.gpu.cases import Case
from fwk import SamplingParams
from fwk.plugins import PluginSet

REFERENCE = {name: "torch" for name in ("attention_backend", "operator_backend", "sampling_backend")}


def measure(case: Case, device: str, plugins: PluginSet | None = None) -> dict[str, Any]:
    """What came of a case: ``passed``, and numbers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.model))
        return (parity if case.kind == "parity" else speed)(case, folder, device, plugins)


def prompts(case: Case) -> list[list[int]]:
    random = np.random.default_rng(case.options.get("random_seed", 0))
    return random.integers(3, case.model["vocab_size"] - 1, (case.num_seqs, case.num_prompt)).tolist()


def options_of(case: Case) -> dict[str, Any]:
    """Of ``fwk.LLM``: random weights, and a cache that holds all there is."""
    tokens = case.num_seqs * (case.num_prompt + case.num_tokens + 32)
    settings = {"load_format": "dummy", "max_total_tokens": tokens, "max_running_requests": max(case.num_seqs, 4)}
    settings["prefix_cache"] = "none"
    return settings | case.options


def parity(case: Case, folder: str, device: str, plugins: PluginSet | None) -> dict[str, Any]:
    """Log-probabilities of tokens up to the first that differs; there, the CPU must have thought as much of either."""
    asked = SamplingParams(max_tokens=case.num_tokens, temperature=0.0, logprobs=2, ignore_eos=True)
    exact = {**options_of(case), **REFERENCE, "dtype": "float32"}
    for name in ("kv_cache_dtype", "quantization", "disable_cuda_graph", "disable_overlap_schedule"):
        exact.pop(name, None)
    with fwk.LLM(folder, device="cpu", **exact) as llm:
        wanted = llm.generate(prompts(case), asked)
    with fwk.LLM(folder, device=device, plugins=plugins, **options_of(case)) as llm:
        chosen = dict(llm.engine.info.chosen)
        found = llm.generate(prompts(case), asked)
    worst, num_same = 0.0, 0
    for mine, other in zip(found, wanted, strict=True):
        for ours, theirs in zip(mine.logprobs or [], other.logprobs or [], strict=True):
            if ours.token_id != theirs.token_id:
                worst = max(worst, theirs.logprob - dict(theirs.top).get(ours.token_id, -np.inf))
                break
            worst, num_same = max(worst, abs(ours.logprob - theirs.logprob)), num_same + 1
    return {
        "passed": bool(worst <= case.tolerance),
        "largest difference": float(worst),
        "tokens alike": num_same,
        "tokens": case.num_seqs * case.num_tokens,
        "chosen": chosen,
    }


def speed(case: Case, folder: str, device: str, plugins: PluginSet | None) -> dict[str, Any]:
    """Seconds of prompts, and of each token after them, once everything is warm."""
    with fwk.LLM(folder, device=device, plugins=plugins, **options_of(case)) as llm:
        chosen = dict(llm.engine.info.chosen)
        seconds: dict[int, float] = {}
        for count in (1, 1, case.num_tokens):
            asked = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            started = time.perf_counter()
            llm.generate(prompts(case), asked)
            seconds[count] = time.perf_counter() - started
    step = (seconds[case.num_tokens] - seconds[1]) / (case.num_tokens - 1)
    return {
        "passed": True,
        "prompt tokens a second": case.num_seqs * case.num_prompt / seconds[1],
        "tokens a second": case.num_seqs / step,
        "ms a token": step * 1e3,
        "chosen": chosen,
    }


def main() -> None:
    case_file, result_file, device = sys.argv[1:]
    case = Case(**json.loads(Path(case_file).read_text(encoding="utf-8")))
    Path(result_file).write_text(json.dumps(measure(case, device)), encoding="utf-8")


if __name__ == "__main__":
    main()
