"""A decode step with K and V in huge pages and in small ones, in turns.

    OMP_NUM_THREADS=1 python -m benchmarks.cache_pages [--batches 1,8,32] [--context 128] [--repeat 20]

One process holds an engine for each kind of pages; the step that each has recorded is replayed in turns. Median
milliseconds of one thread, and the median of the turns' ratios (small pages to huge ones, above 1 where huge pages are
faster) with their quartiles.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from unittest import mock

import torch

import fwk
from benchmarks.step_operators import recorded, timed
from fwk.worker.kv import kv_cache


def small_pages(num_bytes: int) -> torch.Tensor:
    """As ``fwk_native.huge_pages.zeros``, in whatever pages the system has by default."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--quantization", default="auto")
    arguments = parser.parse_args()
    options = {"prefix_cache": "none", "max_total_tokens": 40960, "quantization": arguments.quantization}
    with ExitStack() as stack:
        huge = stack.enter_context(fwk.LLM(**options))
        with mock.patch.object(kv_cache.pages, "zeros", small_pages):
            small = stack.enter_context(fwk.LLM(**options))
        print("| batch | operator | ms, huge pages | small pages | small / huge |\n| --- | --- | --- | --- | --- |")
        for batch in map(int, arguments.batches.split(",")):
            tapes = [recorded(llm, batch, arguments.context) for llm in (huge, small)]
            turns = [[timed(tape, [1], 1) for tape in tapes] for _ in range(arguments.repeat)]
            for name in ("attend", "whole"):
                pairs = [(ours[name][0] / 1e3, theirs[name][0] / 1e3) for ours, theirs in turns]
                middle = [statistics.median(values) for values in zip(*pairs, strict=True)]
                low, ratio, high = statistics.quantiles((y / x for x, y in pairs), n=4)
                print(
                    f"| {batch} x {arguments.context} | {name} | {middle[0]:.2f} | {middle[1]:.2f} | "
                    f"{ratio:.2f} ({low:.2f} to {high:.2f}) |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
