"""The real server as a subprocess, and what must hold of it after every check."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil

from fwk.plugins import discover
from fwk_native import ahead
from tests.helpers.http import NO_TLS
from tests.helpers.packages import import_path, write_metadata
from tests.helpers.zygote import zygote

PLUGINS = Path(__file__).parents[1] / "faults/plugin"
START_SECONDS = 40.0
SETTLE_SECONDS = 10.0
PATIENCE = 5.0
"""Every deadline is one of a quiet machine; what waits for it waits so many times as long before it calls it missed."""

MAX_LAG = 1.0
"""Seconds the event loop of the API process may stand still."""

NOISE = 10.0
"""Seconds that a busy machine may keep it from its core."""

MAX_GROWTH = 1.05
"""Of the memory of API process and engine since the first requests, once they have given back what they freed."""

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""A random Llama in which every id is a token: one per byte, and names for those above."""

CONTEXT = TINY["max_position_embeddings"]
VOCAB = TINY["vocab_size"]
GOLDEN = {"prompt": "The golden request: ", "max_tokens": 16, "temperature": 0, "return_token_ids": True}
FAKE = ("--executor", "fake", "--max-running-requests", "8", "--max-prefill-tokens", "128")
FAKE_CHUNK = 64

_LEAK = re.compile(r'Traceback|File "|/(?:srv|tmp|home|root|usr|work|proc|var)/|\.py\b|\b0x[0-9a-f]{6,}|ipc:', re.ASCII)


def assert_no_leak(body: str) -> None:
    """Rule 9: what clients read holds no path, address or traceback."""
    found = _LEAK.search(body)
    assert found is None, f"a body tells {found.group()!r}: {body[:500]}"


def install_plugins(folder: Path) -> str:
    """A distribution with the plugins of the tests; returns the PYTHONPATH on which the server finds it."""
    write_metadata(folder, "fwk-faults", {"tests.faults": "fwk_faults"})
    return import_path(folder, PLUGINS)


def until(condition: Callable[[], Any], seconds: float, what: str, pause: float = 0.01) -> Any:
    """Wait for a true value, ``seconds`` times ``PATIENCE``; how long it took is for the caller to measure."""
    end = time.monotonic() + PATIENCE * seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {PATIENCE:g} times {seconds} s: {what}"
        time.sleep(pause)


class Server:
    """``fwk serve`` on a free loopback port. ``start`` returns once /health answers 200.

    forked: of a process that has imported what it needs (``tests.helpers.zygote``), else by ``python -m fwk``, as it is
    with variables of its own, or threads for torch.
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        python_path: str | None = None,
        environment: dict[str, str] | None = None,
        forked: bool = True,
    ) -> None:
        build_kernels()
        self.folder = Path(tempfile.mkdtemp(prefix="fwk-rig-"))  # short: a socket's path goes into it
        self._log = self.folder / "log"
        caches = Path(tempfile.gettempdir()) / "fwk-rig-torch"  # what torch keeps is no leftover of the server
        ours = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), "TORCHINDUCTOR_CACHE_DIR": str(caches)}
        if python_path is not None:
            ours["PYTHONPATH"] = python_path
        environment = {**os.environ, **ours, **(environment or {})}
        forked = forked and "--cpu-threads" not in flags and zygote().serves(environment)
        if "--device" not in flags:
            flags = ("--device", "cpu", *flags)
        if "--load-format" not in flags:
            flags = ("--load-format", "dummy", *flags)
        if "--port" not in flags:
            flags = ("--port", "0", *flags)
        if "--health-monitor" not in flags:  # a death that no test foresees shows, and a dead engine stays dead
            flags = ("--health-monitor", "false", *flags)
        if "--spare-engines" not in flags:  # a process more, which most tests are without
            flags = ("--spare-engines", "0", *flags)
        if str(PLUGINS) in environment.get("PYTHONPATH", ""):  # another package's: they take part where they are named
            at = flags.index("--enable-plugin") + 1 if "--enable-plugin" in flags else 0
            flags = (*flags[:at], *(() if at else ("--enable-plugin",)), "fwk-faults", *flags[at:])
        if "--max-total-tokens" not in flags:
            flags = ("--max-total-tokens", "8192", *flags)  # proving the books takes as long as there are blocks
        words = ["serve", str(model), "--served-model-name", "tiny", "--check-blocks", "true", *flags]
        with self._log.open("wb") as log:
            if forked:
                self.process = zygote().start(["fwk", *words], environment, log.fileno())
            else:
                command = [sys.executable, "-m", "fwk", *words]
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, env=environment)
        self.url = ""
        self.headers: dict[str, str] = {}
        self.engine: psutil.Process | None = None  # the first, if there are several
        self._family: list[psutil.Process] = []
        self._may_end: set[int] = set()
        self.golden: list[int] = []
        self._num_fds = 0
        self._log_seen = 0
        self._files: set[str] = set()
        self._memory = 0.0

    def start(self, key: str | None = None) -> Server:
        """Wait until it serves; note its golden answer."""
        if key is not None:
            self.headers = {"authorization": f"Bearer {key}"}
        self.wait_ready()
        self.engine = self.engines()[0]
        self.golden = self._golden()
        self._warm_up()
        self.settle()
        return self

    def wait_ready(self) -> str:
        """Wait until it serves; returns its address."""

        def address() -> str | None:
            assert self.process.poll() is None, f"the server ended: {self.log}"
            found = re.search(r" serves .* at (http://127\.0\.0\.1:\d+)", self.log)
            return found.group(1) if found else None

        self.url = until(address, START_SECONDS, "the server's ready line")
        until(lambda: self.health() == 200, 5, "health after the ready line")
        self._family = self.children()
        return self.url

    def settle(self) -> None:
        """What it has now is its own: processes, descriptors, files, memory. Called again for another engine."""
        until(lambda: not self._has_jobs(), SETTLE_SECONDS, "the end of what its helper runs")
        self._family = self.children()
        self._may_end = {process.pid for process in self._family if forks_engines(process)}  # with nothing to wait for
        self.engine = self.engines()[0]
        self._num_fds = self._count_fds()
        self._files = self._open_files()
        self.note_memory()

    def note_memory(self) -> None:
        """What it has now is what it needs: growth is measured from here."""
        self._memory = self._process().get("memory", 0.0)

    def _warm_up(self) -> None:
        """What is imported or reserved with the first requests is no leak."""
        golden = {"messages": [{"role": "user", "content": GOLDEN["prompt"]}], "max_tokens": 2}
        bodies = [(GOLDEN, "/v1/completions"), (golden, "/v1/chat/completions")] * 8
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda i, one: self.post(one[0] | {"stream": i % 3 == 0}, one[1]), range(16), bodies))

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engines(self, *, recursive: bool = False) -> list[psutil.Process]:
        """The processes with a model, with their own if ``recursive``: all but the helper, and what forks them."""
        found = psutil.Process(self.process.pid).children(recursive)
        return [p for p in found if not is_helper(p) and not forks_engines(p)]

    def _has_jobs(self) -> bool:
        """Whether its helper runs something, a fork each."""
        helpers = [p for p in psutil.Process(self.process.pid).children() if is_helper(p)]
        return any(helper.children() for helper in helpers)

    def _strangers(self) -> list[psutil.Process]:
        """Processes it did not have, but for a helper: that starts in a pause between requests, and may do so late."""
        helpers = [p for p in psutil.Process(self.process.pid).children() if is_helper(p)]
        return [p for p in self.children() if p not in [*self._family, *helpers]]

    @property
    def leftovers(self) -> list[Path]:
        """What it has in the folder for temporary files."""
        return [path for path in self.folder.iterdir() if path != self._log]

    def post(self, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None) -> httpx.Response:
        headers = self.headers | (headers or {})
        return httpx.post(self.url + path, json=body, headers=headers, timeout=240, verify=NO_TLS)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=60, verify=NO_TLS)

    def health(self) -> int:
        reply = self.get("/health")
        assert_no_leak(reply.text)
        return reply.status_code

    def stats(self) -> dict[str, int]:
        """The engine's books as it last reported them: with each answer, each abort, and twice a second."""
        return self.get("/faults/stats").json()

    def metric(self, name: str) -> float:
        """A gauge or counter of /metrics."""
        found = re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found, f"/metrics has no {name}"
        return sum(map(float, found))

    def _golden(self) -> list[int]:
        reply = self.post(GOLDEN)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]

    def _count_fds(self) -> int:
        assert self.engine is not None
        return psutil.Process(self.process.pid).num_fds() + self.engine.num_fds()

    def _open_files(self) -> set[str]:
        """Socket files of the server, and shared memory that its processes have."""
        sockets = {str(path) for path in self.folder.rglob("*") if path.is_socket()}
        mapped: set[str] = set()
        for process in [self.process, *self.children()]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a job of the helper has ended
                mapped.update(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))
        return sockets | mapped

    def _process(self) -> dict[str, float]:
        """What the plugin tells of the API process, with the memory of the engine added; nothing without the plugin."""
        told = self.get("/faults/process").json()
        assert self.engine is not None
        if "memory" not in told:
            return {}
        return told | {"memory": told["memory"] + self.engine.memory_info().rss}

    def loop_times(self) -> dict[str, float]:
        """How late and how busy the event loop was since this was asked last."""
        return self._process()

    def is_idle(self) -> bool:
        names = ("fwk:num_requests_running", "fwk:num_requests_waiting", "fwk:kv_cache_usage_perc")
        return not any(self.metric(name) for name in names)

    def _books_balance(self) -> bool:
        stats = self.stats()
        unowned = stats["num_free_blocks"] + stats["num_cached_blocks"]
        return stats["num_held_blocks"] == 0 and unowned == stats["num_blocks"]

    def check_invariants(self, *, may_log_errors: bool = False) -> None:
        """What must hold after every check, as far as it can be seen from outside."""
        until(lambda: self.health() == 200, SETTLE_SECONDS, "health 200")
        until(self.is_idle, SETTLE_SECONDS, "running = waiting = 0 and no block held")
        assert self._golden() == self.golden  # its answer brings the books up to date
        until(self._books_balance, SETTLE_SECONDS, "free + cached blocks = all")
        until(lambda: not self._strangers(), SETTLE_SECONDS, "no processes but those it had")
        assert all(is_alive(process) for process in self._family if process.pid not in self._may_end)
        until(lambda: self._count_fds() <= self._num_fds + 4, SETTLE_SECONDS, "connections closed")
        assert self._open_files() == self._files, self._open_files() ^ self._files
        process = self._process()
        assert process["busy"] < MAX_LAG, f"the event loop computed for {process['busy']:.1f} s in one go"
        assert process["late"] < MAX_LAG + NOISE, f"the event loop stood still for {process['late']:.1f} s"
        growth = process["memory"] / self._memory
        if growth >= MAX_GROWTH:  # the engine rests for two seconds first
            what = f"memory within 5 %, not {growth:.3f} times what it was"
            until(lambda: self._process()["memory"] < MAX_GROWTH * self._memory, SETTLE_SECONDS, what, 0.5)
        log = self.log
        fresh, self._log_seen = log[self._log_seen :], len(log)
        assert may_log_errors or "Traceback" not in fresh, fresh

    def take_new_engine(self) -> None:
        """Another engine process has taken the place of a dead one: it is the one that is looked at from now on."""
        self.settle()
        assert self.engines() == [self.engine], "no more engines than before"

    def signal_engine(self, number: signal.Signals) -> None:
        assert self.engine is not None
        self.engine.send_signal(number)

    def stop(self, seconds: float = 20) -> int:
        """SIGTERM; returns the exit code. Nothing of the server is left afterwards."""
        self.process.terminate()
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        code = self.process.wait(PATIENCE * seconds)
        until(lambda: not any(map(is_alive, self._family)), 5, "the end of the engine")
        assert "Fatal Python error" not in self.log, self.log
        return code

    def close(self) -> None:
        """Whatever state it is in. pytest shows what is printed here when a test has failed."""
        print(f"--- {self.url} ended with {self.process.poll()}; the end of its log:\n{self.log[-5000:]}")
        for process in filter(None, [*self._family, psutil.Process(self.process.pid) if self.is_running else None]):
            if is_alive(process):
                process.kill()
        self.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None


@cache
def build_kernels() -> None:
    """Those that servers would begin with by the way: the processes that do are none that tests count on."""
    ahead.main([str(source) for item in discover().all() for source in item.declaration.kernels])


def is_helper(process: psutil.Process) -> bool:
    """Whether it is the process in which the API process compiles grammars, or a job of that."""
    try:
        return "fwk.server.helper_process" in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def forks_engines(process: psutil.Process) -> bool:
    """Whether it is the process that engines are forked from."""
    try:
        return process.name() == "fwk-forks"
    except psutil.Error:  # it has ended
        return False


def is_alive(process: psutil.Process | None) -> bool:
    """Whether it runs; a zombie whose new parent has not reaped it yet does not."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def write_model(folder: Path, **settings: Any) -> Path:
    """The tiny model's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | settings))
    return folder
