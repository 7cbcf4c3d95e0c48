"""The peer of ``against_transformers``: reads ``[scenario, repeat]`` lines, answers with measurements."""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from typing import Any

from fwk.bench.workload import WORKLOADS, Maker, Workload


class Clock:
    """A streamer that only looks at the time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._is_prompt = True

    def put(self, value: Any) -> None:
        if not self._is_prompt:
            self.times.append(time.perf_counter())
        self._is_prompt = False

    def end(self) -> None: ...


def main() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.against_transformers import opened

    model_file = opened()
    tokenizer = model_file.checkpoint.tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = AutoModelForCausalLM.from_pretrained(
            str(model_file.path.parent), gguf_file=model_file.path.name, dtype=torch.float32
        )
    raw = {k: v for k, v in model_file.checkpoint.config().items() if k not in ("architectures", "dtype")}
    config = AutoConfig.for_model("llama", **{k: v for k, v in raw.items() if k != "model_type"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.load_state_dict({k: v.to(torch.bfloat16) for k, v in source.state_dict().items()})
    model.tie_weights()
    model.eval()
    del source
    maker = Maker(tokenizer, "")

    def prompts(name: str, repeat: int) -> list[list[int]]:
        asked = maker.requests(WORKLOADS[name], repeat)
        return [tokenizer.encode(item.body["prompt"], add_special_tokens=False).ids for item in asked]

    run(model, WORKLOADS["S1"], prompts("S1", -1)[:1])
    print("{}", flush=True)
    for line in sys.stdin:
        name, repeat = json.loads(line)
        print(json.dumps(run(model, WORKLOADS[name], prompts(name, repeat))), flush=True)


def run(model: Any, scenario: Workload, all_prompts: list[list[int]]) -> dict[str, float]:
    """Static batches of the scenario's concurrency."""
    wall, ttfts, tpots = 0.0, [], []
    for start in range(0, len(all_prompts), scenario.concurrency):
        batch = all_prompts[start : start + scenario.concurrency]
        seconds, ttft, tpot = generate(model, batch, scenario.output_len)
        wall += seconds
        ttfts.append(ttft)
        tpots.append(tpot)
    return {
        "tokens_per_s": len(all_prompts) * scenario.output_len / wall,
        "ttft_ms": 1e3 * statistics.median(ttfts),
        "tpot_ms": 1e3 * statistics.median(tpots),
    }


def generate(model: Any, batch: list[list[int]], output_len: int) -> tuple[float, float, float]:
    """Seconds in all, to the first token, and per further token. A streamer takes one prompt; batches run once more."""
    import torch

    ids = torch.tensor(batch)
    settings = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "pad_token_id": 2,
    }
    with torch.inference_mode():
        if len(batch) == 1:
            clock = Clock()
            started = time.perf_counter()
            model.generate(ids, max_new_tokens=output_len, min_new_tokens=output_len, streamer=clock, **settings)
            seconds = time.perf_counter() - started
            return seconds, clock.times[0] - started, (clock.times[-1] - clock.times[0]) / (output_len - 1)
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=1, min_new_tokens=1, **settings)
        first = time.perf_counter() - started
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=output_len, min_new_tokens=output_len, **settings)
        seconds = time.perf_counter() - started
        return seconds, first, (seconds - first) / (output_len - 1)


if __name__ == "__main__":
    main()
