"""What telling observers costs the event loop, with one that is quick and with one that never returns.

    python -m benchmarks.observers [--events 20000]

Microseconds an event takes on the event loop's thread: told in place, as a plain call would (the base), through the
queue of an observer that keeps up, and through that of one that blocks. Measured in turns within one run; compare the
ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Callable

from fwk.interfaces.observer import Observer, ObserverContext, RequestRecord
from fwk.server.observer_dispatch import Observers

TURN = 200


class Counting(Observer):
    """What metrics do: add up."""

    def __init__(self) -> None:
        super().__init__(ObserverContext("m"))
        self.total = 0.0

    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        self.total += seconds


class Blocking(Counting):
    """Never comes back from its first call."""

    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        threading.Event().wait()


async def measure(events: int) -> dict[str, list[float]]:
    """Seconds an event, by way."""
    record = RequestRecord("r", "", 10, 0.0)
    plain, quick, blocked = Counting(), Observers(), Observers()
    quick.add(Counting(), "observers.quick")
    blocked.add(Blocking(), "observers.blocked")
    ways: dict[str, Callable[[RequestRecord, int, float], None]] = {
        "in place": plain.tokens_received,
        "keeps up": quick.tokens_received,
        "blocks": blocked.tokens_received,
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(events // TURN):
        for way, tell in ways.items():
            started = time.perf_counter()
            for _ in range(TURN):
                tell(record, 1, 0.01)
            found[way].append((time.perf_counter() - started) / TURN)
        await asyncio.sleep(0.005)  # what a step leaves: some hundred events at a time
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=18_000)
    found = asyncio.run(measure(parser.parse_args().events))
    for way, seconds in found.items():
        each = sorted(value * 1e6 for value in seconds)
        print(f"{way:10} median {statistics.median(each):.2f} us, worst turn of {TURN}: {each[-1]:.2f} us an event")


if __name__ == "__main__":
    main()
