"""An engine process of ours, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from fwk.interfaces.parallel import threads_each
from fwk_process.crash import HANGS
from fwk_process.forks import ChildProcess, Start
from fwk_process.kernel_caches import bound_kernel_caches
from fwk_process.parent import Adoption, terminal_signals_blocked
from fwk_process.threads import configure_omp_env

if TYPE_CHECKING:
    from fwk.engine.process import LaunchSpec


class EngineProcess(ChildProcess):
    """Imports what every engine needs or has it, and loads the model once it is told which (``tell``)."""

    def __init__(self, start: Start, adoption: Adoption | None = None) -> None:
        from fwk_native.memory import MemoryPrefaulter  # noqa: PLC0415 - not before an early engine has been started

        self._memory = MemoryPrefaulter()
        self.model_bytes = 0
        """What the model's files hold, where that is known before it is told what to load."""
        super().__init__(start, adoption)

    def forked(self) -> None:
        self._memory.give_back()

    def tell(self, spec: LaunchSpec) -> None:
        """What to load and where to meet. One that has died already is told in vain.

        Until it has been forked, memory is taken ahead: what blocks hold in four bits or eight are numbers of up to
        sixteen.
        """
        import msgspec  # noqa: PLC0415 - as in __init__

        if not self.is_there:
            self._memory.take(2 * self.model_bytes)
        with contextlib.suppress(OSError):
            self.socket.sendall(msgspec.json.encode(spec) + b"\n")

    def write_stack(self) -> None:
        """Have it note where it is (``fwk_process.crash``), unless it is stopped."""
        self.send_signal(HANGS)


def run_engine(
    module: str, num_engines: int, stdin: socket.socket | int, passed: int | None = None
) -> subprocess.Popen[bytes]:
    """A module of an engine as a process, which has the descriptor ``passed`` and is told its number."""
    passes = [] if passed is None else [passed]
    command = [sys.executable, "-P", "-m", module, *map(str, passes)]  # -P: no code from the current directory
    number = stdin if isinstance(stdin, int) else stdin.fileno()
    with terminal_signals_blocked():
        return subprocess.Popen(command, stdin=number, env=_environment(num_engines), pass_fds=passes)


def _environment(num_engines: int) -> dict[str, str]:
    """The engine writes its log unbuffered, its threads do not spin for long, and several engines share them."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if num_engines > 1:
        environment["OMP_NUM_THREADS"] = str(threads_each(num_engines, os.environ))
    configure_omp_env(environment)
    bound_kernel_caches(environment)
    return environment
