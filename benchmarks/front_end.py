"""What a token costs the HTTP process: detokenising, server-sent events, the message from the engine.

    python -m benchmarks.front_end [--concurrency 32] [--requests 64] [--output-len 128]

A tiny random model serves, so that the HTTP process is what is busy. Reported is its processor time, which other
processes on the machine lengthen little, by token and by step of the engine (as many tokens as there are streams), the
client's by token (where both share the cores, a step is as much longer), and the median time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

import psutil
from tests.helpers.rig import VOCAB, Server, write_model

from fwk_kit.bench.load import run
from fwk_kit.bench.workload import Asked, Workload

PROMPT = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    workload = Workload("front end", num_requests=arguments.requests, concurrency=arguments.concurrency)
    rng = random.Random(0)
    flags = ("--max-running-requests", str(arguments.concurrency), "--max-total-tokens", "65536")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(write_model(Path(folder) / "model"), *flags)
        try:
            server.start()
            api = psutil.Process(server.process.pid)
            print("| repeat | us a token | ms a step | tokens/s | TTFT p50 ms | client: us a token |")
            print("| --- | --- | --- | --- | --- | --- |")
            for repeat in range(arguments.repeat):
                asked = [_asked(rng, arguments.output_len) for _ in range(arguments.requests)]
                before, client = api.cpu_times(), time.process_time()
                replies, seconds = asyncio.run(run(server.url, workload, asked))
                after, client = api.cpu_times(), time.process_time() - client
                tokens = sum(reply.num_output for reply in replies)
                each = 1e6 * (after.user + after.system - before.user - before.system) / tokens
                step, rate = each * arguments.concurrency / 1e3, tokens / seconds
                ttft = 1e3 * statistics.median(reply.ttft for reply in replies)
                ours = 1e6 * client / tokens
                print(f"| {repeat} | {each:.0f} | {step:.2f} | {rate:.0f} | {ttft:.0f} | {ours:.0f} |", flush=True)
        finally:
            server.close()


def _asked(rng: random.Random, output_len: int) -> Asked:
    prompt = [rng.randrange(5, VOCAB) for _ in range(PROMPT)]
    wanted = {"max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **wanted}
    return Asked("/v1/completions", body, 0.0, PROMPT, output_len)


if __name__ == "__main__":
    main()
