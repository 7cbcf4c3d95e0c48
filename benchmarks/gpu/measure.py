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
from safetensors.torch import save_file

import fwk
from benchmarks.gpu.cases import Case
from fwk import SamplingParams
from fwk.plugins import PluginSet
from fwk_loaders.dummy.weights import DummyWeights

DRAFT = "draft"
DRAFTING = ("speculative_algorithm", "speculative_num_draft_tokens")
DETERMINISTIC = "enable_deterministic_inference"
GEMM = ("int4_gemm_backend", "int8_gemm_backend", "fp8_gemm_backend")
GRAPHS = ("disable_cuda_graph", "cuda_graph_bs")
SETTINGS = ("kv_cache_dtype", "quantization", "disable_overlap_schedule", DETERMINISTIC, *GEMM, *GRAPHS)
"""Of what is served, which the reference goes without."""
REFERENCE = {name: "torch" for name in ("attention_backend", "operator_backend", "sampling_backend")}


def measure(case: Case, device: str, plugins: PluginSet | None = None) -> dict[str, Any]:
    """What came of a case: ``passed``, and numbers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.model))
        if case.draft:
            save_draft(case.draft, Path(folder) / DRAFT)
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
    for name in (*SETTINGS, *DRAFTING):
        exact.pop(name, None)
    if case.options.get("quantization") == "int4":  # too coarse to be compared with the numbers it stands for
        exact["quantization"] = "int4"
    if "moe_runner_backend" in exact:
        exact["moe_runner_backend"] = "torch"
    served = options_of(case)
    if case.draft:
        served["speculative_draft_model_path"] = str(Path(folder) / DRAFT)
    with fwk.LLM(folder, device="cpu", **exact) as llm:
        wanted = llm.generate(prompts(case), asked)
    with fwk.LLM(folder, device=device, plugins=plugins, **served) as llm:
        chosen, memory = dict(llm.engine.info.chosen), told(llm.engine.info.memory)
        found = llm.generate(prompts(case), asked)
        alone = [llm.generate([prompt], asked)[0] for prompt in prompts(case)] if served.get(DETERMINISTIC) else found
    worst, num_same = 0.0, 0
    for mine, other in zip(found, wanted, strict=True):
        for ours, theirs in zip(mine.logprobs or [], other.logprobs or [], strict=True):
            if ours.token_id != theirs.token_id:
                worst = max(worst, theirs.logprob - dict(theirs.top).get(ours.token_id, -np.inf))
                break
            worst, num_same = max(worst, abs(ours.logprob - theirs.logprob)), num_same + 1
    return {
        "passed": bool(worst <= case.tolerance) and [o.logprobs for o in alone] == [o.logprobs for o in found],
        "largest difference": float(worst),
        "tokens alike": num_same,
        "tokens": case.num_seqs * case.num_tokens,
        "chosen": chosen,
        "memory": memory,
    }


def save_draft(config: dict[str, Any], folder: Path) -> None:
    """A Llama as a checkpoint, whose weights are those that a served one of random weights has by the same names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.norm": (hidden,)}
    shapes |= dict.fromkeys(("model.embed_tokens", "lm_head"), (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= dict.fromkeys((f"{at}.input_layernorm", f"{at}.post_attention_layernorm"), (hidden,))
        shapes |= {f"{at}.self_attn.q_proj": (heads, hidden), f"{at}.self_attn.o_proj": (hidden, heads)}
        shapes |= dict.fromkeys((f"{at}.self_attn.k_proj", f"{at}.self_attn.v_proj"), (kv_heads, hidden))
        shapes |= dict.fromkeys((f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"), (inner, hidden))
        shapes[f"{at}.mlp.down_proj"] = (hidden, inner)
    source = DummyWeights(config)
    tensors = {f"{name}.weight": source.tensor(f"{name}.weight", shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def told(memory: dict[str, int]) -> str:
    """Bytes of the device, in MiB."""
    return ", ".join(f"{name} {size / 2**20:.0f}" for name, size in memory.items())


def speed(case: Case, folder: str, device: str, plugins: PluginSet | None) -> dict[str, Any]:
    """Seconds of prompts, and of each token after them, once everything is warm."""
    with fwk.LLM(folder, device=device, plugins=plugins, **options_of(case)) as llm:
        chosen, memory = dict(llm.engine.info.chosen), told(llm.engine.info.memory)
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
        "memory": memory,
    }


def main() -> None:
    case_file, result_file, device = sys.argv[1:]
    case = Case(**json.loads(Path(case_file).read_text(encoding="utf-8")))
    Path(result_file).write_text(json.dumps(measure(case, device)), encoding="utf-8")


if __name__ == "__main__":
    main()
