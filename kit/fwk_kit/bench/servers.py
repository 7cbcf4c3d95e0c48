"""Servers to measure: started from a command line on a free port, watched, and stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil

from fwk.errors import ConfigError
from fwk_http.clients import Allowance, open_here, pieces_of

POLL_SECONDS = 0.05
STOP_SECONDS = 20.0
PAGE_SECONDS = 5.0
MAX_PAGE_BYTES = 16 * 2**20
"""Of what a server tells of itself."""


@dataclass
class Running:
    """A server that answers. cold_start: seconds from its start until then; peak_rss: bytes, over all its processes.

    pid: of its first process, which leads a group; None when it is not ours.
    """

    url: str
    cold_start: float | None = None
    peak_rss: int = 0
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """How to reach a server: its address, or the command that starts it, with ``{port}`` where the port goes."""

    name: str
    url: str | None = None
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    ready: str = "/health"

    @contextmanager
    def running(self, timeout: float = 600.0) -> Iterator[Running]:
        """The server, started if it is ours to start. Raises ``ConfigError`` when it does not come up."""
        if self.url is not None:
            yield Running(self.url)
            return
        port = free_port()
        command = [part.replace("{port}", str(port)) for part in self.command]
        with tempfile.TemporaryFile() as log:
            started = time.perf_counter()
            try:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **self.environment},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"server {self.name} cannot be started: {error}") from None
            running = Running(f"http://127.0.0.1:{port}", pid=process.pid)
            try:
                with watching(running):
                    _wait(self, process, running.url, started + timeout, log)
                    running.cold_start = time.perf_counter() - started
                    yield running
            finally:
                _stop(process)


def fingerprint(url: str, api_key: str | None = None) -> str | None:
    """Which plugins a server of fwk sees (``fwk plugins freeze``); None for servers that do not tell."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        found = json.loads(_page(f"{url}/server_info", headers))
    except (OSError, ValueError, http.client.HTTPException, RecursionError):
        return None
    told: object = cast("dict[str, object]", found).get("fingerprint") if isinstance(found, dict) else None
    return told if isinstance(told, str) else None


def counters(url: str, api_key: str | None = None) -> dict[str, float]:
    """What a server of fwk has counted (``/metrics``), by name, with ``/POSITION`` where there is one.

    Of several models the numbers together; empty for other servers.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        page = _page(f"{url}/metrics", headers).decode()
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    found: dict[str, float] = {}
    for name, labels, value in _COUNTER.findall(page):
        position = _POSITION.search(labels)
        key = name if position is None else f"{name}/{position[1]}"
        found[key] = found.get(key, 0.0) + float(value)
    return found


def _page(url: str, headers: Mapping[str, str]) -> bytes:
    with open_here(urllib.request.Request(url, headers=dict(headers)), PAGE_SECONDS) as reply:
        return b"".join(pieces_of(reply, Allowance(MAX_PAGE_BYTES, PAGE_SECONDS)))


_COUNTER = re.compile(r"^fwk:(\w+_total)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'\bposition="(\d+)"')


def parse(text: str) -> Server:
    """``NAME=URL`` or ``NAME=COMMAND``; a command of fwk's needs no ``{port}``. Raises ``ConfigError``."""
    name, equals, what = text.partition("=")
    if not equals or not name or not what:
        raise ConfigError(f"--server takes NAME=URL or NAME=COMMAND, not {text!r}")
    if what.startswith(("http://", "https://")):
        return Server(name, url=what)
    words = shlex.split(what)
    if words[:2] == ["fwk", "serve"]:
        return of_fwk(name, words[2:])
    if "{port}" not in what:
        raise ConfigError(f"the command of server {name} must say where its port goes: --port {{port}}")
    return Server(name, command=tuple(words))


def of_fwk(name: str, arguments: list[str], environment: Mapping[str, str] | None = None) -> Server:
    """``fwk serve`` with these arguments, by this Python, which keeps bytecode as an installation has it."""
    if "--port" in arguments:
        raise ConfigError(f"the command of server {name} must leave --port out: a free one is taken")
    command = (sys.executable, "-m", "fwk", "serve", *arguments, "--port", "{port}")
    return Server(name, command=command, environment={"PYTHONDONTWRITEBYTECODE": "", **(environment or {})})


@contextmanager
def of_commit(name: str, ref: str, arguments: list[str]) -> Iterator[Server]:
    """``fwk serve`` of another commit of the repository in the working folder, with the packages installed here.

    Raises ``ConfigError`` when git does not know it, or it cannot be installed.
    """
    with tempfile.TemporaryDirectory(prefix="fwk-bench-") as folder:
        tree, site = Path(folder) / "tree", Path(folder) / "site"
        _run(["git", "worktree", "add", "--detach", str(tree), ref], f"commit {ref}")
        try:
            _run(
                [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(tree)],
                f"commit {ref}",
            )
            yield of_fwk(name, arguments, {"PYTHONPATH": str(site)})
        finally:
            shutil.rmtree(tree, ignore_errors=True)
            _run(["git", "worktree", "prune"], "git worktree prune")


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"{what} cannot be used: {lines[-1] if lines else f'exit status {done.returncode}'}")


def _wait(server: Server, process: subprocess.Popen[bytes], url: str, until: float, log: object) -> None:
    while True:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url + server.ready, timeout=2):
            return
        if process.poll() is not None or time.perf_counter() > until:
            log.seek(0)  # type: ignore[attr-defined]
            said = log.read().decode(errors="replace").strip().splitlines()  # type: ignore[attr-defined]
            how = "ended" if process.poll() is not None else "does not answer"
            raise ConfigError(
                f"server {server.name} {how} before it was ready: {said[-1] if said else 'it said nothing'}"
            )
        time.sleep(POLL_SECONDS)


@contextmanager
def watching(running: Running) -> Iterator[None]:
    """Note the most memory all its processes have together, meanwhile."""
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(running, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(running: Running, ended: threading.Event) -> None:
    while not ended.wait(0.5):
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(running.pid)
            rss = 0
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    rss += process.memory_info().rss
            running.peak_rss = max(running.peak_rss, rss)


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
