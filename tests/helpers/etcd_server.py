"""A real etcd for tests, of one member."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.helpers.ports import free_port

MISSING = "needs etcd (Debian: apt-get install etcd-server)"


def is_missing() -> bool:
    return shutil.which("etcd") is None


class EtcdServer:
    """``etcd`` on loopback; ``start`` after ``stop`` is another one at the same address that knows nothing."""

    def __init__(self) -> None:
        self.port, self._peer_port = free_port(), free_port()
        self.url = f"etcd://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fwk-etcd-"))
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        urls = ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        urls += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        self.process = subprocess.Popen(
            ["etcd", "--data-dir", str(self._folder), *urls], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("etcd does not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)
