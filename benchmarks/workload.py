"""The scenarios, and prompts of an exact number of tokens made of seeded random words."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

WORDS = [
    *("river", "stone", "light", "garden", "window", "letter", "morning", "paper", "bridge", "market", "story"),
    *("engine", "winter", "music", "table", "forest", "doctor", "village", "answer", "silver", "summer", "mountain"),
    *("question", "island", "harbor", "teacher", "ladder", "candle", "mirror", "orange", "pocket", "bottle", "farmer"),
    *("valley", "circle", "planet", "shadow", "basket", "blanket", "corner", "dinner", "finger", "hammer", "jacket"),
]


@dataclass(frozen=True)
class Scenario:
    """A closed loop: ``num_requests``, ``concurrency`` at a time; lengths in tokens."""

    name: str
    num_requests: int
    concurrency: int
    prompt_len: int
    output_len: int
    shared_prefix_len: int = 0


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("S1", num_requests=8, concurrency=1, prompt_len=128, output_len=128),
        Scenario("S2", num_requests=64, concurrency=32, prompt_len=128, output_len=128),
        Scenario("S3", num_requests=32, concurrency=8, prompt_len=32, output_len=32, shared_prefix_len=1024),
        Scenario("S4", num_requests=1, concurrency=1, prompt_len=3500, output_len=16),
    )
}


def prompt_ids(tokenizer: Tokenizer, length: int, rng: random.Random) -> list[int]:
    """``length`` token ids of random words."""
    text = " ".join(rng.choice(WORDS) for _ in range(length + 8))
    return tokenizer.encode(text, add_special_tokens=False).ids[:length]


def prompts(tokenizer: Tokenizer, scenario: Scenario, repeat: int) -> list[list[int]]:
    """The prompts of one repeat: never those of another, so that no cache helps."""
    rng = random.Random(f"{scenario.name}-{repeat}")
    prefix = prompt_ids(tokenizer, scenario.shared_prefix_len, rng) if scenario.shared_prefix_len else []
    return [prefix + prompt_ids(tokenizer, scenario.prompt_len, rng) for _ in range(scenario.num_requests)]
