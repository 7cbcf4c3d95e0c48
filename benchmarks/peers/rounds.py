"""Rounds: in each, every scenario, and in each scenario every engine once, so that what else happens hits all alike."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.engines import SCENARIOS, Engine, Start
from benchmarks.peers.sessions import Session
from fwk.errors import ConfigError
from fwk_kit.bench.summary import Summary, summarise
from fwk_kit.bench.workload import Maker, Workload


@dataclass(frozen=True, slots=True)
class Record:
    """One run. probe: GB/s one thread read just before it; busy: percent of the processors others used then.

    peak_rss: bytes, shared pages counted in each process; memory: bytes after the run, shared pages counted once.
    """

    engine: str
    version: str
    round: int
    scenario: str
    summary: Summary
    cold_start: float | None
    peak_rss: int
    probe: float
    busy: float
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine that is set up."""

    engine: Engine
    version: str
    start: Start


@dataclass
class Rounds:
    """Runs and their records. What failed is in ``failures``, by engine and scenario, and is not tried again.

    long: seconds; a run that took longer is not repeated. limit: seconds after which a run has failed. until: of
    ``time.monotonic``; no run starts later.
    """

    makers: dict[str, Maker]
    records: Path
    long: float
    limit: float
    until: float
    say: Callable[[str], None]
    failures: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])

    def run(self, engines: Sequence[Ready], scenarios: Sequence[str], count: int, is_apart: bool = False) -> None:
        """``count`` rounds after those that are recorded already.

        is_apart: all rounds of a scenario one after another; each engine is started once for a scenario, and has
        nothing to do while others are measured.
        """
        if is_apart:
            for scenario in scenarios:
                with ExitStack() as house:
                    self.run([_kept(ready, house) for ready in engines], [scenario], count)
            return
        recorded = [record.round for record in read(self.records) if record.scenario in scenarios]
        first = 1 + max(recorded, default=0)
        took: dict[tuple[str, str], float] = {}
        with ExitStack() as house:
            resting: dict[str, Session] = {}
            for number in range(first, first + count):
                for scenario in scenarios:
                    for ready in engines:
                        if time.monotonic() > self.until:
                            self.say("the time is over: what is left of the rounds is left out")
                            return
                        key = ready.engine.name, scenario
                        is_done = key in self.failures or took.get(key, 0.0) > self.long
                        if is_done or scenario not in ready.engine.scenarios:
                            continue
                        record = self._try(ready, scenario, number, house, resting)
                        if record is not None:
                            took[key] = record.summary.seconds

    def _try(
        self,
        ready: Ready,
        scenario: str,
        number: int,
        house: ExitStack,
        resting: dict[str, Session],
    ) -> Record | None:
        began, engine = time.perf_counter(), ready.engine
        try:
            with _awake(ready, scenario, house, resting) as session:
                record = self._measure(ready, session, scenario, number)
        except (ConfigError, TimeoutError, OSError) as error:
            why = f"took more than {self.limit:.0f} s" if isinstance(error, TimeoutError) else str(error)
            self.failures[engine.name, scenario] = why
            self.say(f"{engine.name} is left out of {scenario} from here on: {why}")
            return None
        with self.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")
        self.say(_line(record, time.perf_counter() - began))
        return record

    def _measure(self, ready: Ready, session: Session, scenario: str, number: int) -> Record:
        workload, maker = SCENARIOS[scenario], self.makers[scenario]
        asked = maker.requests(workload, number)
        warm_up = Workload("warm-up", num_requests=workload.concurrency, concurrency=workload.concurrency)
        warm_up = dataclasses.replace(warm_up, input_len=32, output_len=8)
        _all_good(session.load(warm_up, maker.requests(warm_up, number), self.limit)[0])
        busy, probe = psutil.cpu_percent(0.5), read_rate()
        summary = summarise(scenario, *session.load(workload, asked, self.limit))
        if not summary.ttft:
            raise ConfigError(f"no request was answered: {summary.first_error}")
        running = session.running
        start, peak, memory = running.cold_start, running.peak_rss, proportional_memory(running.pid)
        return Record(ready.engine.name, ready.version, number, scenario, summary, start, peak, probe, busy, memory)


def _kept(ready: Ready, house: ExitStack) -> Ready:
    """The same engine; what it is started as stays until ``house`` is left."""
    running: list[Session] = []

    @contextmanager
    def start(scenario: str) -> Iterator[Session]:
        if not running:
            running.append(house.enter_context(ready.start(scenario)))
        yield running[0]

    return dataclasses.replace(ready, start=start)


@contextmanager
def _awake(ready: Ready, scenario: str, house: ExitStack, resting: dict[str, Session]) -> Iterator[Session]:
    """The engine's session: its own, or the one that was paused."""
    engine, start = ready.engine, ready.start
    if not engine.stays:
        with start(scenario) as session:
            yield session
        return
    if engine.name in resting:
        session = resting[engine.name]
        session.go_on()
    else:
        session = resting[engine.name] = house.enter_context(start(scenario))
        house.callback(session.go_on)  # before it is stopped: what is paused hears no signal
    try:
        yield session
    finally:
        session.pause()


def _line(record: Record, seconds: float) -> str:
    summary = record.summary
    return (
        f"round {record.round} {record.scenario} {record.engine}: {summary.output_rate:.1f} tokens/s, TTFT "
        f"{summary.ttft['p50']:.0f} ms, TPOT {summary.tpot['p50']:.1f} ms, {summary.num_failed} failed, in "
        f"{summary.seconds:.1f} s ({seconds:.1f} in all); probe {record.probe:.1f} GB/s, busy {record.busy:.0f} %"
    )


def _all_good(replies: Sequence[Any]) -> None:
    failed = next((reply.error for reply in replies if reply.error is not None), None)
    if failed is not None:
        raise ConfigError(f"it does not answer as it should: {failed}")


def read(records: Path) -> list[Record]:
    """What is recorded so far."""
    if not records.exists():
        return []
    lines = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    return [Record(**{**line, "summary": Summary(**line["summary"])}) for line in lines]


def proportional_memory(pid: int | None) -> int:
    """Bytes of a process and all its children, each page divided by how many processes have it; 0 without one."""
    if pid is None:
        return 0
    total = 0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


def read_rate() -> float:
    """GB/s at which one thread reads 64 MB, the median of nine times; low when something else uses the memory."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    numbers = torch.ones(16 * 2**20)
    seconds: list[float] = []
    for _ in range(9):
        started = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return numbers.nbytes / sorted(seconds)[4] / 1e9


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
