"""What weight formats and rounded activations change: distributions of the next token against float32.

    python -m benchmarks.rounding_loss [--tokens 512] [--configurations CONFIGURATION,...]

The text is a page of Python's manual (``pydoc_data.topics``). For each configuration: the mean Kullback-Leibler
divergence of its distributions from those of float32 on unrounded weights (nats a token), the perplexity of the text,
and how often the most probable token is the same one. A configuration is dtype:quantization:activations.
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import fwk
from fwk import SamplingParams

REFERENCE = "float32:none:full"
CONFIGURATIONS = [
    "bfloat16:none:full",
    "float32:gguf:8bit",
    "bfloat16:gguf:full",
    "bfloat16:gguf:8bit",
    "float32:int8:full",
    "float32:int8:8bit",
    "bfloat16:int8:full",
    "bfloat16:int8:8bit",
]


def distributions(configuration: str, num_tokens: int) -> tuple[Tensor, list[int]]:
    """Logarithms of probabilities [num_tokens - 1, vocab_size] of what follows each token, and the tokens."""
    dtype, quantization, activations = configuration.split(":")
    options: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    if quantization != "none":
        options[f"{quantization}_activations"] = activations
    seen: list[Tensor] = []
    with fwk.LLM(
        prefix_cache="none", max_total_tokens=4096, max_prefill_tokens=num_tokens, disable_cuda_graph=True, **options
    ) as llm:
        tokens = llm.text.encode(topics["objects"])[:num_tokens]
        model = llm.engine.executor._worker._runner.model.model  # type: ignore[attr-defined]
        logits = model.logits

        def watched(hidden: Tensor) -> Tensor:
            found = logits(hidden)
            seen.append(found.float().log_softmax(-1))
            return found

        model.logits = watched
        llm.generate([tokens], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    # The first are of the token that is generated, after the prompt; there is one step.
    return torch.cat(seen[1:]), tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    arguments = parser.parse_args()
    exact, tokens = distributions(REFERENCE, arguments.tokens)
    following = torch.tensor(tokens[1:]).unsqueeze(1)
    print("| dtype:weights:activations | divergence | perplexity | same first choice |\n| --- | --- | --- | --- |")
    for name in [REFERENCE, *arguments.configurations.split(",")]:
        found = exact if name == REFERENCE else distributions(name, arguments.tokens)[0]
        divergence = (exact.exp() * (exact - found)).sum(-1).mean().item()
        perplexity = math.exp(-found.gather(1, following).mean().item())
        same = (exact.argmax(-1) == found.argmax(-1)).float().mean().item()
        print(f"| {name} | {divergence:.5f} | {perplexity:.3f} | {same:.1%} |", flush=True)


if __name__ == "__main__":
    main()
