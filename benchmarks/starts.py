"""Starts of ``fwk serve``, their memory and their tokens, with and without packed weights of an earlier start.

    python -m benchmarks.model_shapes /tmp/1b 1b
    python -m benchmarks.starts /tmp/1b --rounds 3 -- --dtype bfloat16 --quantization int8

A round is a first start, with an empty ``--weights-cache``, and two that find the file. Memory is the peak of all
processes together, sampled ten times a second: what is theirs alone (anonymous) and their share of mapped files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.page import machine

PORT = 8123
TOKENS = 24


@dataclass
class Start:
    """What was measured of one."""

    healthy: float = 0.0
    tokens_a_second: float = 0.0
    text: str = ""
    peaks: dict[str, int] = field(default_factory=lambda: {"anonymous": 0, "all": 0})


def _sample(pid: int, start: Start, is_over: threading.Event) -> None:
    while not is_over.wait(0.1):
        total = {"anonymous": 0, "all": 0}
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(pid)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(OSError):
                    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                    found = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
                    total["all"] += found["Pss:"]
                    total["anonymous"] += found["Anonymous:"]
        for name, size in total.items():
            start.peaks[name] = max(start.peaks[name], size >> 10)


def _complete(count: int) -> str:
    address = f"http://127.0.0.1:{PORT}/v1/"
    with urllib.request.urlopen(address + "models") as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {"model": model, "prompt": "Hello there, this is", "max_tokens": count, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(address + "completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, Any] = json.load(reply)
    return str(answer["choices"][0]["text"])


def start_once(model: str, cache: str, options: list[str], *, waits: bool) -> Start:
    """Start, answer, end. waits: until the file with packed weights is there."""
    command = [sys.executable, "-m", "fwk", "serve", model, "--port", str(PORT), "--weights-cache", cache, *options]
    start, is_over, begun = Start(), threading.Event(), time.perf_counter()
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        sampler = threading.Thread(target=_sample, args=(server.pid, start, is_over))
        sampler.start()
        while not _is_healthy():
            if server.poll() is not None:
                log.seek(0)
                raise SystemExit(log.read().decode())
            time.sleep(0.01)
        start.healthy = time.perf_counter() - begun
        _complete(1)
        begun = time.perf_counter()
        start.text = _complete(TOKENS)
        start.tokens_a_second = TOKENS / (time.perf_counter() - begun)
        while waits and not list(Path(cache).glob("*.weights")):
            time.sleep(0.1)
        is_over.set()
        sampler.join()
        server.send_signal(signal.SIGTERM)
    return start


def _is_healthy() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-cache", action="store_true", help="every start packs")
    own, _, options = " ".join(sys.argv[1:]).partition(" -- ")
    arguments = parser.parse_args(own.split())
    arguments.options = options.split()  # of fwk serve
    found: dict[str, list[Start]] = {"first": [], "second": []}
    size = 0
    for _ in range(arguments.rounds):
        if arguments.no_cache:
            found["first"].append(start_once(arguments.model, "none", arguments.options, waits=False))
            continue
        folder = tempfile.mkdtemp(prefix="fwk-starts-")
        try:
            found["first"].append(start_once(arguments.model, folder, arguments.options, waits=True))
            size = sum(file.stat().st_size for file in Path(folder).iterdir()) >> 20
            found["second"] += [start_once(arguments.model, folder, arguments.options, waits=False) for _ in range(2)]
        finally:
            shutil.rmtree(folder)
    print(f"{machine()}; {Path(arguments.model).name} {' '.join(arguments.options)}; packed {size} MiB\n")
    print("| start | healthy, s: median (least to most) | peak MiB: own, with mapped files | tokens/s |")
    print("| --- | --- | --- | --- |")
    for name, starts in found.items():
        if starts:
            times = [start.healthy for start in starts]
            own, everything = (max(start.peaks[kind] for start in starts) for kind in ("anonymous", "all"))
            speed = statistics.median(start.tokens_a_second for start in starts)
            spread = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
            print(f"| {name} | {spread} | {own:,}, {everything:,} | {speed:.1f} |")
    texts = {start.text for starts in found.values() for start in starts}
    print(f"\n{'the same text from all' if len(texts) == 1 else f'{len(texts)} different texts'}")


if __name__ == "__main__":
    main()
