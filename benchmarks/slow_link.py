"""Stages against tensor parallelism over a slow link: ``python -m benchmarks.slow_link`` (Linux, root).

Two network namespaces, a node of one engine in each, and between them this process, which carries packets of two TUN
devices with a delay each way and a bound on bits per second. Requests come from within the first namespace.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import secrets
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SPACES = ("fwk-link-0", "fwk-link-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
MTU = 9000
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000

CLIENT = """
import json, sys, time, urllib.request
def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    asked = urllib.request.Request("http://127.0.0.1:8000" + path, data, head)
    with urllib.request.urlopen(asked, timeout=600) as reply:
        return reply.read()
end = time.monotonic() + 600
while True:
    try:
        ask("/health"); break
    except OSError:
        if time.monotonic() > end: raise
        time.sleep(0.5)
from concurrent.futures import ThreadPoolExecutor
def one(i, count):
    prompt = [(13 * i + 7 * j) % 250 + 20 for j in range(PROMPT)]
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return json.loads(ask("/generate", {"input_ids": prompt, "sampling_params": sampling}))["output_ids"]
one(0, 2)
found = {}
for width in WIDTHS:
    with ThreadPoolExecutor(width) as pool:
        started = time.monotonic()
        tokens = list(pool.map(lambda i: one(i + 1, COUNT), range(width)))
        found[width] = (time.monotonic() - started, tokens)
print(json.dumps(found))
"""


def run(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def namespaces() -> Iterator[None]:
    for name in SPACES:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        run("ip", "netns", "add", name)
    try:
        yield
    finally:
        for name in SPACES:
            run("ip", "netns", "del", name)


def open_tun(space: str, address: str) -> int:
    """A TUN device in a namespace; the descriptor is good in this one."""
    opened: list[int] = []

    def inside() -> None:
        with open(f"/run/netns/{space}", "rb") as where:
            if ctypes.CDLL(None, use_errno=True).setns(where.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"link0", IFF_TUN | IFF_NO_PI))
        opened.append(tun)

    thread = threading.Thread(target=inside)  # a thread has a namespace of its own
    thread.start()
    thread.join()
    run("ip", "-n", space, "link", "set", "lo", "up")
    run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "link0")
    run("ip", "-n", space, "link", "set", "link0", "mtu", str(MTU), "txqueuelen", "1000", "up")
    return opened[0]


def carry(tuns: Sequence[int], delay: float, bits: float, is_over: threading.Event) -> None:
    """Packets of each device to the other, ``delay`` seconds later, and no faster than ``bits`` a second."""
    lines: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free = [0.0, 0.0]
    while not is_over.is_set():
        now = time.monotonic()
        due = [line[0][0] - now for line in lines if line]
        ready, _, _ = select.select(tuns, [], [], min(0.1, max(0.0, *due, 0.0)) if due else 0.1)
        now = time.monotonic()
        for tun in ready:
            side = tuns.index(tun)
            packet = os.read(tun, MTU + 100)
            free[side] = max(free[side], now) + len(packet) * 8 / bits
            lines[side].append((free[side] + delay, packet))
        for side, line in enumerate(lines):
            while line and line[0][0] <= time.monotonic():
                os.write(tuns[1 - side], line.popleft()[1])


def measure(model: Path, flags: Sequence[str], client: str) -> dict[str, tuple[float, list[list[int]]]]:
    """Seconds and tokens by the number of requests at once."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_text(secrets.token_hex(32))
        nodes: list[subprocess.Popen[bytes]] = []
        for rank, space in enumerate(SPACES):
            words = [
                *("ip", "netns", "exec", space, sys.executable, "-m", "fwk", "serve", str(model), "--nnodes", "2"),
                *("--node-rank", str(rank), "--dist-init-addr", f"{ADDRESSES[0]}:20000", "--dist-token-file", str(key)),
                *("--load-format", "dummy", "--max-total-tokens", "8192", "--max-running-requests", "32"),
                *("--host", "127.0.0.1", "--port", "8000", "--prefix-cache", "none", *flags),
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            nodes.append(subprocess.Popen(words, env=environment, stdout=sys.stderr, stderr=sys.stderr))
        try:
            told = subprocess.run(
                ["ip", "netns", "exec", SPACES[0], sys.executable, "-c", client], check=True, stdout=subprocess.PIPE
            )
            return json.loads(told.stdout)
        finally:
            nodes[0].terminate()
            for node in nodes:
                node.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with config.json; the weights are random")
    parser.add_argument("--delay", type=float, default=10.0, help="milliseconds each way")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    given = parser.parse_args()
    client = CLIENT.replace("WIDTHS", repr(tuple(given.widths)))
    client = client.replace("COUNT", str(given.tokens)).replace("PROMPT", str(given.prompt))
    found: dict[str, dict[str, tuple[float, list[list[int]]]]] = {}
    with namespaces():
        tuns = [open_tun(*each) for each in zip(SPACES, ADDRESSES, strict=True)]
        is_over = threading.Event()
        carrier = threading.Thread(target=carry, args=(tuns, given.delay / 1000, given.mbit * 1e6, is_over))
        carrier.start()
        try:
            for name, flags in (("pp 2", ["--pp-size", "2"]), ("tp 2", ["--tp-size", "2"])):
                found[name] = measure(given.model, flags, client)
        finally:
            is_over.set()
            carrier.join()
    print("| requests at once | pp 2, tokens/s | tp 2, tokens/s | ratio |")
    print("| --- | --- | --- | --- |")
    for width in given.widths:
        (ours, tokens), (theirs, others) = found["pp 2"][str(width)], found["tp 2"][str(width)]
        total = sum(map(len, tokens))
        same = "" if tokens == others else " (tokens differ)"
        print(f"| {width} | {total / ours:.2f} | {total / theirs:.2f} | {theirs / ours:.1f}{same} |")


if __name__ == "__main__":
    main()
