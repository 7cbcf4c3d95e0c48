"""One rank's process, seen from the engine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import psutil

from fwk.interfaces.parallel import threads_each
from fwk_executors.processes.messages import Frames, FromRank, frame

REAP_SECONDS = 0.5


class Rank:
    """A started process, and our end of the pair of sockets."""

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fwk_executors.processes.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
            )
        self.frames: Frames[FromRank] = Frames(self.connection, FromRank)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"the engine's worker of rank {self.rank} (pid {self.pid})"

    def send(self, body: bytes) -> None:
        """Send it an encoded message."""
        self.connection.sendall(frame(body))

    def obituary(self) -> str:
        """How it ended."""
        try:
            code = self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self.name} closed its connection"
        return f"{self.name} {ended(code)}"

    def state(self) -> str:
        """What the system says it does."""
        try:
            return psutil.Process(self.pid).status()
        except psutil.Error:
            return "gone"

    def release(self) -> None:
        """Close the connection: a process that can, ends."""
        self.connection.close()

    def reap(self, seconds: float) -> None:
        """Wait for its end, and bring it about after that time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ended(code: int) -> str:
    """How a process ended, by its exit code."""
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def environment_of_ranks(size: int, inherited: Mapping[str, str], interface: str | None = None) -> dict[str, str]:
    """The threads of this process are divided among ``size`` ranks, and collectives keep to a network interface: to
    the loopback one, where no other is given."""
    threads = threads_each(size, inherited)
    environment = {**inherited, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    if interface is not None:
        environment.setdefault("NCCL_SOCKET_IFNAME", interface)
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        return environment
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return environment
