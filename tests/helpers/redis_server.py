"""A real Redis server for tests, and one that answers what it is told."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

MISSING = "needs redis-server (Debian: apt-get install redis-server)"


def is_missing() -> bool:
    return shutil.which("redis-server") is None


class RedisServer:
    """``redis-server`` on a unix socket, keeping nothing on disk."""

    def __init__(self, *flags: str) -> None:
        if is_missing():
            pytest.skip(MISSING)
        self._folder = Path(tempfile.mkdtemp(prefix="fwk-redis-"))
        self.path = self._folder / "s"
        self.url = f"unix://{self.path}"
        self._flags = flags
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.path), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [*command, "--dir", str(self._folder), *self._flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(self.path))
                    return
                except OSError:
                    time.sleep(0.01)
        raise AssertionError("redis-server does not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class ScriptedServer:
    """Greets as Redis does, then answers every command with the given bytes.

    pause: seconds between its bytes. resets: hang up by a reset after the first answer.
    """

    def __init__(self, answer: bytes, *, resets: bool = False, pause: float = 0.0) -> None:
        self._answer, self._resets, self._pause = answer, resets, pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.num_connections = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            client.recv(65536)
            client.sendall(b"+PONG\r\n")
            while client.recv(65536):
                for start in range(len(self._answer)) if self._pause else ():
                    client.sendall(self._answer[start : start + 1])
                    time.sleep(self._pause)
                client.sendall(b"" if self._pause else self._answer)
                if self._resets:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    break
        except OSError:
            pass
        client.close()

    def close(self) -> None:
        self._listener.close()
