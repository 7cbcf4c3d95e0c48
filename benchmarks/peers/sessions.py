"""Running engines: a server behind HTTP, or a library in a process of its own, loaded and timed alike."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fwk.errors import ConfigError
from fwk_kit.bench.load import Reply, fits, run, served_model
from fwk_kit.bench.servers import Running, Server, watching
from fwk_kit.bench.workload import Asked, Workload


class Session(ABC):
    """One running engine. cold_start: seconds until it could be asked; peak_rss: bytes, over all its processes."""

    running: Running

    @abstractmethod
    def load(self, workload: Workload, asked: list[Asked], limit: float) -> tuple[list[Reply], float]:
        """Send everything as the workload says; the replies, and the seconds they took altogether.

        Raises ``TimeoutError`` after ``limit`` seconds.
        """

    def pause(self) -> None:
        """Take the processor away until ``go_on``: another engine is measured."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Give it back."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.running.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.running.pid, number)


class Http(Session):
    """An OpenAI server."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self._model = asyncio.run(served_model(running.url))

    def load(self, workload: Workload, asked: list[Asked], limit: float) -> tuple[list[Reply], float]:
        for item in asked:
            item.body["model"] = self._model
        return asyncio.run(asyncio.wait_for(run(self.running.url, workload, asked), limit))


@contextmanager
def http(server: Server) -> Iterator[Session]:
    """A server, started and stopped. Raises ``ConfigError`` when it does not come up."""
    with server.running() as running:
        yield Http(running)


class InProcess(Session):
    """A worker program that reads loads as lines of JSON, and answers with what came when."""

    def __init__(self, process: subprocess.Popen[str], running: Running, tokenize: Tokenize, name: str) -> None:
        self._process = process
        self.running = running
        self._tokenize = tokenize
        self._name = name

    def load(self, workload: Workload, asked: list[Asked], limit: float) -> tuple[list[Reply], float]:
        requests = [
            {
                "prompt": self._tokenize.ids(item.body),
                "num_output": item.output_len,
                "schema": json.dumps(item.schema) if item.schema is not None else None,
            }
            for item in asked
        ]
        self.send({"concurrency": workload.concurrency, "requests": requests})
        killer = threading.Timer(limit, self._process.kill)
        killer.start()
        try:
            answer = self.receive()
        except ConfigError:
            if killer.finished.is_set():
                raise TimeoutError from None
            raise
        finally:
            killer.cancel()
        return [self._reply(item, found) for item, found in zip(asked, answer["replies"], strict=True)], answer[
            "seconds"
        ]

    def send(self, content: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(content) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(f"{self._name} ended with status {self._process.wait()}")
        return json.loads(line)

    def _reply(self, item: Asked, found: Mapping[str, Any]) -> Reply:
        times: list[float] = found["times"]
        text = self._tokenize.text(found["token_ids"])
        reply = Reply(found["sent"], times[-1], times, item.input_len, len(times), text)
        if item.schema is not None:
            reply.is_valid = fits(text, item.schema)
        return reply


class Tokenize:
    """What the HTTP side of a server does with a body's text, for engines that take and give token ids."""

    def __init__(self, chat_ids: Callable[..., Sequence[int]], tokenizer: Any) -> None:
        self._chat_ids = chat_ids
        self._tokenizer = tokenizer

    def ids(self, body: Mapping[str, Any]) -> list[int]:
        if "messages" in body:
            return list(self._chat_ids(body["messages"]))
        return self._tokenizer.encode(body["prompt"], add_special_tokens=False).ids

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids))


@contextmanager
def in_process(name: str, command: Sequence[str], tokenize: Tokenize, log: Path) -> Iterator[Session]:
    """A worker, started and stopped. Raises ``ConfigError`` when it ends before it is ready."""
    started = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True
        )
        running = Running("", pid=process.pid)
        try:
            with watching(running):
                session = InProcess(process, running, tokenize, name)
                session.receive()
                running.cold_start = time.perf_counter() - started
                yield session
        finally:
            process.kill()
            with process:  # closes the pipes
                pass
