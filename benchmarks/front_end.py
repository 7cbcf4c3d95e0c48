"""What a token costs the HTTP process: detokenising, server-sent events, the message from the engine.

    python -m benchmarks.front_end [--concurrency 32] [--requests 64] [--output-len 128]

A tiny random model serves, so that the HTTP process is what is busy. Reported is its processor time, which other
processes on the machine lengthen little, by token and by step of the engine (as many tokens as there are streams).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

import psutil
from tests.faults.rig import VOCAB, Server, write_model

from benchmarks.load_client import load
from benchmarks.workload import Scenario

PROMPT = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    scenario = Scenario("front end", arguments.requests, arguments.concurrency, PROMPT, arguments.output_len)
    rng = random.Random(0)
    flags = ("--max-running-requests", str(arguments.concurrency), "--max-total-tokens", "65536")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(write_model(Path(folder) / "model"), *flags)
        try:
            server.start()
            api = psutil.Process(server.process.pid)
            print("| repeat | us a token | ms a step | tokens/s |\n| --- | --- | --- | --- |")
            for repeat in range(arguments.repeat):
                prompts = [[rng.randrange(5, VOCAB) for _ in range(PROMPT)] for _ in range(arguments.requests)]
                before = api.cpu_times()
                outcome = asyncio.run(load(server.url, scenario, prompts))
                after = api.cpu_times()
                seconds = after.user + after.system - before.user - before.system
                each = seconds / (arguments.requests * arguments.output_len)
                step = 1e3 * each * arguments.concurrency
                print(f"| {repeat} | {1e6 * each:.0f} | {step:.2f} | {outcome['tokens_per_s']:.0f} |", flush=True)
        finally:
            server.close()


if __name__ == "__main__":
    main()
