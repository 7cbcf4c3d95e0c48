"""What a MoE runner is worth: tokens a second of a Qwen3-MoE shape with random weights, runners in turns, in one run.

    python -m benchmarks.experts [--runners torch cpu] [--quantization none int8] [--rounds 3]

The shape has 1,024 hidden numbers, 12 layers and 32 experts of which a token has 4. Prints, for each format, the median
of tokens a second for one request and for 16 at once, and of the seconds to a first token of a prompt of 800.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from fwk import LLM, SamplingParams

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
NUM_TOKENS = 48
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0)


def decode(llm: LLM, count: int) -> float:
    """Tokens a second of ``count`` requests at once."""
    prompts = [list(range(5 + i, 40 + i)) for i in range(count)]
    start = time.perf_counter()
    llm.generate(prompts, GREEDY)
    return count * NUM_TOKENS / (time.perf_counter() - start)


def prefill(llm: LLM, salt: int) -> float:
    """Seconds to the first token of a prompt that no cache holds."""
    start = time.perf_counter()
    llm.generate([[3 + salt, *range(5, 804)]], SamplingParams(max_tokens=1, temperature=0))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", nargs="+", default=["torch", "cpu"])
    parser.add_argument("--quantization", nargs="+", default=["none", "int8"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| weights | runner | one, tokens/s | 16, tokens/s | prompt of 800, s |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        for quantization in args.quantization:
            engines = {
                name: LLM(
                    folder,
                    load_format="dummy",
                    dtype="bfloat16",
                    quantization=quantization,
                    moe_runner_backend=name,
                    max_model_len=1024,
                )
                for name in args.runners
            }
            found: dict[str, list[tuple[float, ...]]] = {name: [] for name in engines}
            for salt in range(args.rounds):
                for name, llm in engines.items():
                    found[name].append((decode(llm, 1), decode(llm, 16), prefill(llm, salt)))
            for name, rows in found.items():
                one, many, prompt = (statistics.median(column) for column in zip(*rows, strict=True))
                print(f"| {quantization} | {name} | {one:.0f} | {many:.0f} | {prompt:.2f} |", flush=True)


if __name__ == "__main__":
    main()
