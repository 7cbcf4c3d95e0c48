"""What is asked of a server: prompts of known lengths, made of seeded words, and when they are sent."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fwk.errors import ConfigError
from fwk_files.regular import read_text

WORDS = (
    *("river", "stone", "light", "garden", "window", "letter", "morning", "paper", "bridge", "market", "story"),
    *("engine", "winter", "music", "table", "forest", "doctor", "village", "answer", "silver", "summer", "mountain"),
    *("question", "island", "harbor", "teacher", "ladder", "candle", "mirror", "orange", "pocket", "bottle", "farmer"),
    *("valley", "circle", "planet", "shadow", "basket", "blanket", "corner", "dinner", "finger", "hammer", "jacket"),
)

MAX_DATASET_BYTES = 4 * 2**30

TRIES = 20
"""Texts tried until one has the wanted number of tokens after a round trip through the tokenizer."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 20},
        "likes_music": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "likes_music"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """How many requests, how they arrive, and how long they are (in tokens).

    kind: ``random`` (lengths between ``spread`` times the given ones and those), ``sharegpt`` (lengths as long-tailed
    as conversations': log-normal with these means), ``structured`` (chats constrained by a JSON schema).
    prefix_len: tokens that all prompts begin with, alongside their own ``input_len``.
    concurrency: requests under way at most (closed loop). rate: requests a second, arriving as a Poisson process; None
    sends them as fast as ``concurrency`` allows.
    """

    name: str
    kind: str = "random"
    num_requests: int = 64
    concurrency: int = 32
    rate: float | None = None
    input_len: int = 128
    output_len: int = 128
    prefix_len: int = 0
    spread: float = 1.0


WORKLOADS = {
    w.name: w
    for w in (
        Workload("random"),
        Workload("sharegpt", kind="sharegpt", input_len=161, output_len=338),  # means of the vLLM paper (2023), §6.1
        Workload("shared-prefix", num_requests=32, concurrency=8, input_len=32, output_len=32, prefix_len=1024),
        Workload("long-prompt", num_requests=1, concurrency=1, input_len=3500, output_len=16),
        Workload("structured", kind="structured", num_requests=16, concurrency=8, output_len=64),
        Workload("S1", num_requests=8, concurrency=1),
        Workload("S2"),
        Workload("S3", num_requests=32, concurrency=8, input_len=32, output_len=32, prefix_len=1024),
        Workload("S4", num_requests=1, concurrency=1, input_len=3500, output_len=16),
        Workload("S5", kind="structured", num_requests=16, concurrency=8, output_len=64),
    )
}
"""By name: a kind each, and the scenarios S1 to S5 of the published comparisons."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: where to, the body, when (seconds after the start), and the tokens expected of it."""

    path: str
    body: dict[str, Any]
    at: float
    input_len: int
    output_len: int
    schema: dict[str, Any] | None = None


@dataclass
class Maker:
    """Makes the requests of a workload; the same seed and repeat give the same, another repeat shares no prompt."""

    tokenizer: Tokenizer
    model: str
    seed: int = 0
    ignores_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    def requests(self, workload: Workload, repeat: int = 0, dataset: Path | None = None) -> list[Asked]:
        """Raises ``ConfigError`` when the dataset is not in ShareGPT's form."""
        rng = random.Random(f"{workload.name}-{self.seed}-{repeat}")
        arrivals = _arrivals(workload, rng)
        if dataset is not None:
            pairs = _conversations(dataset)
            rng.shuffle(pairs)
            return [self._conversation(pair, at) for pair, at in zip(_endless(pairs), arrivals, strict=False)]
        prefix = text_of(self.tokenizer, workload.prefix_len, rng) + " " if workload.prefix_len else ""
        asked: list[Asked] = []
        for number, at in enumerate(arrivals):
            if workload.kind == "structured":
                asked.append(self._structured(workload, number + repeat * 1000, at))
                continue
            inputs, outputs = _lengths(workload, rng)
            text = prefix + text_of(self.tokenizer, inputs, rng).lstrip()
            asked.append(self._completion(text, inputs + workload.prefix_len, outputs, at))
        return asked

    def _completion(self, prompt: str, input_len: int, output_len: int, at: float) -> Asked:
        body = {"prompt": prompt, **self._settings(output_len)}
        if self.ignores_eos:
            body["ignore_eos"] = True
        return Asked("/v1/completions", body | self.extra, at, input_len, output_len)

    def _conversation(self, pair: tuple[str, str], at: float) -> Asked:
        lengths = [len(self.tokenizer.encode(text, add_special_tokens=False).ids) for text in pair]
        return self._completion(pair[0], lengths[0], max(1, lengths[1]), at)

    def _structured(self, workload: Workload, number: int, at: float) -> Asked:
        question = f"Give me the data of an imaginary person number {number} as JSON with name, age, city, likes_music."
        schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        body = {"messages": [{"role": "user", "content": question}], "response_format": schema}
        body |= self._settings(workload.output_len) | self.extra
        return Asked("/v1/chat/completions", body, at, 0, workload.output_len, PERSON)

    def _settings(self, output_len: int) -> dict[str, Any]:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "max_tokens": output_len, "temperature": 0, **usage}


def changed(workload: Workload, **given: Any) -> Workload:
    """The workload with what the user gave, None meaning nothing."""
    return replace(workload, **{name: value for name, value in given.items() if value is not None})


def text_of(tokenizer: Tokenizer, length: int, rng: random.Random) -> str:
    """Words that are ``length`` tokens, also after a server has encoded them again."""
    for _ in range(TRIES):
        words = " ".join(rng.choice(WORDS) for _ in range(length + 8))
        text = tokenizer.decode(tokenizer.encode(words, add_special_tokens=False).ids[:length])
        if len(tokenizer.encode(text, add_special_tokens=False).ids) == length:
            return text
    raise ConfigError(f"the tokenizer makes no text of words that stays {length} tokens when it is encoded again")


def _lengths(workload: Workload, rng: random.Random) -> tuple[int, int]:
    if workload.kind == "sharegpt":
        return _long_tailed(workload.input_len, rng), _long_tailed(workload.output_len, rng)
    least = workload.spread
    return tuple(max(1, round(n * rng.uniform(least, 1.0))) for n in (workload.input_len, workload.output_len))  # type: ignore[return-value]


def _long_tailed(mean: int, rng: random.Random, sigma: float = 1.0) -> int:
    """Log-normal with this mean, between 4 tokens and eight times the mean."""
    drawn = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return int(min(max(drawn, 4), 8 * mean))


def _arrivals(workload: Workload, rng: random.Random) -> list[float]:
    """When requests arrive: all at once in a closed loop, with exponential gaps at a rate."""
    if workload.rate is None:
        return [0.0] * workload.num_requests
    at, times = 0.0, list[float]()
    for _ in range(workload.num_requests):
        at += rng.expovariate(workload.rate)
        times.append(at)
    return times


def _endless(pairs: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    while True:
        yield from pairs


def _conversations(path: Path) -> list[tuple[str, str]]:
    """First questions and their answers, from a ShareGPT file."""
    try:
        entries = json.loads(read_text(path, MAX_DATASET_BYTES))
        turns = [[turn["value"] for turn in entry["conversations"][:2]] for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"--dataset {path} is not in ShareGPT's form, [{{'conversations': [{{'value': TEXT}}, ...]}}, ...]: {error}"
        ) from None
    pairs = [(t[0], t[1]) for t in turns if len(t) == 2 and all(isinstance(x, str) and x for x in t)]
    if not pairs:
        raise ConfigError(f"--dataset {path} holds no conversation with a question and an answer")
    return pairs
