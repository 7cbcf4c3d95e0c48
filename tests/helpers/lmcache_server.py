"""LMCache's server: an imitation of its protocol for the gate, and the real one out of an environment of its own.

``tests/clients/test_lmcache.py`` runs the same on both.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.helpers.install import run
from tests.helpers.ports import free_port

NEEDS = (
    "aiohttp", "cachetools", "numba", "numpy<=2.2.6", "prometheus_client<=0.24.1", "psutil", "py-cpuinfo", "pyyaml",
    "requests", "sortedcontainers",
)  # fmt: skip
"""Of what LMCache depends on, what its server imports. With torch, which is lent; cupy and the like are not needed."""

START_SECONDS = 60
NOTHING = (400, 0, 1, 2, 0, 0, 0, 0, 0)


class LMCacheImitation:
    """Entries in a dict, each command answered as ``lmcache_server`` does, the reply to GET in two sends.

    stalls: GET is not answered. answer: every command but HEALTH gets these bytes instead.
    """

    def __init__(self, answer: bytes | None = None, *, resets: bool = False) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.stalls = False
        self._answer, self._resets = answer, resets
        self._clients: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"lm://127.0.0.1:{self.port}"
        self._start()

    def stop(self) -> None:
        """Nobody listens, and those who are connected are hung up on."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def start(self) -> None:
        """Again, with nothing of what it had."""
        self.entries.clear()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._start()

    def hang_up(self) -> None:
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self._clients.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # stopped already
            self.stop()

    def _start(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self._clients.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client.makefile("rb") as incoming:
            while len(message := incoming.read(186)) == 186:
                command, length, *_, key = struct.unpack("=9i150s", message)
                data = incoming.read(length) if command == 1 else b""
                self._answer_to(client, command, key.strip(), data)
        client.close()

    def _answer_to(self, client: socket.socket, command: int, key: bytes, data: bytes) -> None:
        has = key in self.entries
        if self._answer is not None and command != 5:
            client.sendall(self._answer)
            if self._resets:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                raise OSError("as told")
        elif command == 1:
            self.entries[key] = data
        elif command == 2 and not self.stalls:
            entry = self.entries.get(key, b"")
            found = (200, len(entry), 4, 6, len(entry), 0, 0, 0, 0)
            client.sendall(struct.pack("=9i", *(found if has else NOTHING)))
            client.sendall(entry)
        elif command in (3, 5):
            client.sendall(struct.pack("=9i", 200 if has or command == 5 else 400, *NOTHING[1:]))


class LMCacheServer:
    """``lmcache_server`` itself."""

    def __init__(self, python: Path, log: Path) -> None:
        self.port = free_port()
        self.url = f"lm://127.0.0.1:{self.port}"
        self._python, self._log = python, log
        self.start()

    def start(self) -> None:
        with self._log.open("w") as log:
            command = [str(self._python), "-m", "lmcache.v1.server", "127.0.0.1", str(self.port)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.stop()


def make_environment(folder: Path) -> Path:
    """Its interpreter: LMCache without the gigabytes for GPUs, and the torch that runs the tests."""
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(folder)])
    install = [str(python), "-m", "pip", "install", "--quiet"]
    run([*install, "--no-deps", "lmcache>=0.5.6,<0.6"])
    run([*install, *NEEDS])
    import torch

    lent = Path(torch.__file__).parents[1]
    (next(folder.glob("lib/python3*/site-packages")) / "torch-of-the-tests.pth").write_text(f"{lent}\n")
    (folder / "complete").touch()
    return python
