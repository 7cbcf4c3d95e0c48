"""What drafts save: tokens a second with and without each speculative decoder, in turns, in one run.

    python -m benchmarks.drafts [--model MODEL] [--head FOLDER] [--rounds 3]

Two tasks, greedy: ``chat``, questions that ``fwk train-draft`` does not hold, and ``edit``, a text to repeat with one
word changed. One request at a time, and 32 at once. Prints a table in Markdown: the median ratio to the same engine
without drafts, and of the steps with drafts how many accepted 0, 1, 2 ... of them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

import fwk
from fwk import SamplingParams
from fwk_speculative.drafting import drafting

QUESTIONS = (
    "Why is the sky blue?", "What should I pack for a week in the mountains?", "Tell me about the city of Lisbon.",
    "How does a refrigerator work?", "Write a limerick about a cat.", "How do viruses differ from bacteria?",
    "How can I remember names better?", "Explain what a neural network is.", "Describe your perfect Sunday.",
    "Why do leaves change colour?", "What makes a good leader?", "How is paper made?", "Give me ideas for a party.",
    "What is the purpose of a constitution?", "How do submarines dive?", "Write a polite letter of complaint.",
)  # fmt: skip
PASSAGE = (
    "The old lighthouse stood at the end of the pier, where the fishermen mended their nets every morning. Its lamp "
    "had not been lit for thirty years, but the keeper's daughter still climbed the stairs each evening to clean the "
    "glass. She said that one day a ship would need it, and on that day it should shine."
)


def prompts(task: str, llm: fwk.LLM) -> list[list[int]]:
    """As token ids, through the chat template."""
    words = ("pier", "lamp", "ship", "glass", "stairs", "nets", "keeper", "evening")
    edits = [f"Repeat this text word for word, with '{word}' in capitals:\n\n{PASSAGE}" for word in words]
    texts = QUESTIONS if task == "chat" else edits
    return [llm.text.chat_ids([{"role": "user", "content": text}]) for text in texts]


@contextlib.contextmanager
def counting(counts: Counter[int]) -> Iterator[None]:
    """Count the steps of sequences with drafts by how many of them were accepted."""
    made = drafting.Verified

    def counted(slots: np.ndarray, num_drafts: np.ndarray, num_accepted: np.ndarray) -> Any:
        counts.update(num_accepted[num_drafts > 0].tolist())
        return made(slots, num_drafts, num_accepted)

    drafting.Verified = counted  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        drafting.Verified = made  # type: ignore[misc]


def measure(llm: fwk.LLM, texts: list[list[int]], at_once: int, tokens: int) -> float:
    """Tokens a second."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    groups = [(texts * at_once)[i : i + at_once] for i in range(0, len(texts) if at_once == 1 else 1, at_once)]
    started = time.perf_counter()
    count = sum(len(done.token_ids) for group in groups for done in llm.generate(group, sampling))
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--head", help="an EAGLE-3 head (fwk train-draft)")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    ways: dict[str, dict[str, Any]] = {
        "none": {},
        "ngram": {"speculative_algorithm": "ngram"},
        "suffix": {"speculative_algorithm": "suffix", "speculative_suffix_capacity": 0},
    }
    if arguments.head:
        head = {"speculative_algorithm": "eagle3", "speculative_draft_model_path": arguments.head}
        ways |= {f"eagle3, {n} steps": {**head, "speculative_num_steps": n} for n in (2, 3, 4)}
        ways["eagle3, tree 2 x 3"] = {**head, "speculative_num_steps": 3, "speculative_eagle_topk": 2}
    common: dict[str, Any] = {"max_total_tokens": 32768, "max_running_requests": 32, "prefix_cache": "none"}
    engines = {
        name: fwk.LLM(arguments.model, quantization=arguments.quantization, **common, **options)
        for name, options in ways.items()
    }
    print("| task | at once | decoder | ratio | range | tokens/s | accepted drafts: share of steps |", flush=True)
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for task in ("chat", "edit"):
        for at_once in (1, 32):
            rates: dict[str, list[float]] = {name: [] for name in engines}
            counts: dict[str, Counter[int]] = {name: Counter() for name in engines}
            for llm in engines.values():
                measure(llm, prompts(task, llm)[:1], 1, 8)
            for _ in range(arguments.rounds):
                for name, llm in engines.items():
                    with counting(counts[name]):
                        rates[name].append(measure(llm, prompts(task, llm), at_once, arguments.tokens))
            for name, of_it in rates.items():
                ratios = sorted(a / b for a, b in zip(of_it, rates["none"], strict=True))
                total = sum(counts[name].values())
                shares = ", ".join(f"{n}: {100 * c / total:.0f} %" for n, c in sorted(counts[name].items()))
                print(
                    f"| {task} | {at_once} | {name} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} to "
                    f"{ratios[-1]:.2f} | {statistics.median(of_it):.0f} | {shares} |",
                    flush=True,
                )
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
