"""What requests of text alone cost a model that takes images, as a ratio to the model of text within it.

    python -m benchmarks.text_alone --pairs 20

Two servers of random weights stand side by side, one of SmolVLM-256M's shape and one of its decoder. They are asked in
turn, in pairs whose order alternates: a long prompt and one token, then a short prompt and many tokens in several
streams. The medians of the pairs' ratios are to lie within 0.99 and 1.01. Needs the extra [vision].
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.picture_gaps import CONFIG, VOCAB, server, write_model

KINDS = ("prompt", "decode")


def write_text_model(folder: Path) -> None:
    """The decoder of ``write_model``'s, for the dummy loader."""
    write_model(folder)
    config = {**CONFIG["text_config"], "architectures": ["LlamaForCausalLM"], "dtype": CONFIG["dtype"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").unlink()


def ask(url: str, prompt: list[int], max_tokens: int) -> None:
    """One completion."""
    given: Mapping[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=given, timeout=600).raise_for_status()


def seconds(url: str, kind: str, number: int, streams: int) -> float:
    """What the requests of one side of a pair take. number: no two pairs have a prompt in common."""
    first = [3 + number % 200, 3 + number // 200]
    if kind == "prompt":
        sent = [([*first, *(7 + i * (number + 1) % (VOCAB - 20) for i in range(510))], 1)]
    else:
        sent = [([*first, 5 + i], 64) for i in range(streams)]
    start = time.perf_counter()
    with ThreadPoolExecutor(len(sent)) as pool:
        list(pool.map(lambda one: ask(url, *one), sent))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--streams", type=int, default=4)
    given = parser.parse_args()
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        urls: list[str] = []
        for write in (write_model, write_text_model):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write(folder)
            urls.append(stack.enter_context(server(folder, [])))
        for kind in KINDS:
            for url in urls:
                seconds(url, kind, 10_000, given.streams)
            for number in range(given.pairs):
                sides = (0, 1) if number % 2 else (1, 0)
                took = {side: seconds(urls[side], kind, number, given.streams) for side in sides}
                ratios[kind].append(took[0] / took[1])
                print(kind, round(ratios[kind][-1], 4), flush=True)
    print("| requests | median of ratios | quartiles |")
    for kind, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"| {kind} | {middle:.3f} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    main()
