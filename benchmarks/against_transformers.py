"""fwk's server against transformers' own ``generate``, same weights, same precision, interleaved in one run.

    python -m benchmarks.against_transformers [--repeat 3] [--scenarios S1,S2,S4] [--out FILE.json]

transformers runs in a process of its own without HTTP, with static batches (S2: two batches of 32 that start together),
which spares it scheduling and streaming. The server streams over HTTP to a client on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from fwk.bench.load import run
from fwk.bench.servers import of_fwk
from fwk.bench.summary import summarise
from fwk.bench.workload import WORKLOADS, Asked, Maker
from fwk.plugins import build_config, discover
from fwk.worker.opened_model import OpenedModel, open_model


def opened() -> OpenedModel:
    """The default model."""
    plugins = discover()
    return open_model(build_config(plugins, {}), plugins, print)


def load(url: str, name: str, asked: list[Asked]) -> dict[str, float]:
    """One run against the server; raises when a request fails."""
    summary = summarise(name, *asyncio.run(run(url, WORKLOADS[name], asked)))
    if summary.num_failed:
        raise RuntimeError(summary.first_error)
    return {
        "tokens_per_s": summary.output_rate,
        "ttft_ms": summary.ttft["p50"],
        "tpot_ms": summary.tpot["p50"],
    }


class Transformers:
    """``generate`` in a process of its own, driven by lines of JSON."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.transformers_worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def run(self, name: str, repeat: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, repeat]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scenarios", default="S1,S2,S4")
    parser.add_argument("--out")
    parser.add_argument("--server-args", default="--dtype bfloat16")
    arguments = parser.parse_args()
    maker = Maker(opened().checkpoint.tokenizer(), "smollm2-135m-instruct")
    names = arguments.scenarios.split(",")
    runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {"fwk": [], "transformers": []} for name in names}
    peer = Transformers()
    with of_fwk("fwk", arguments.server_args.split()).running() as server:
        print(f"cold start to /health 200: {server.cold_start:.2f} s", flush=True)
        load(server.url, "S1", maker.requests(WORKLOADS["S1"], -1)[:1])  # warm-up
        for repeat in range(arguments.repeat):
            for name in names:
                runs[name]["fwk"].append(load(server.url, name, maker.requests(WORKLOADS[name], repeat)))
                runs[name]["transformers"].append(peer.run(name, repeat))
                print(name, repeat, {k: v[-1] for k, v in runs[name].items()}, flush=True)
    peer.close()
    report(runs)
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump({"cores": os.cpu_count(), "runs": runs}, file, indent=1)


def report(runs: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    """Medians, and the median of each repeat's ratio (above 1: fwk is faster)."""
    print("| scenario | measure | fwk | transformers generate | ratio (per repeat) |\n| --- | --- | --- | --- | --- |")
    for name, sides in runs.items():
        for measure in ("tokens_per_s", "ttft_ms", "tpot_ms"):
            ours = [run[measure] for run in sides["fwk"]]
            theirs = [run[measure] for run in sides["transformers"]]
            pairs = zip(ours, theirs, strict=True)
            ratios = [a / b if measure == "tokens_per_s" else b / a for a, b in pairs]
            print(
                f"| {name} | {measure} | {statistics.median(ours):.1f} | {statistics.median(theirs):.1f} | "
                f"{statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)}) |"
            )


if __name__ == "__main__":
    main()
