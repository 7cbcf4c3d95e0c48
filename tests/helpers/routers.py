"""SGLang's and vLLM's routers, between a prefill and a decode server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import httpx

from tests.helpers.ports import free_port
from tests.helpers.rig import until

ROUTERS = {"sglang-router": "sglang_router.launch_router", "vllm-router": "vllm_router.launch_router"}
MODES = {"sglang-router": "--pd-disaggregation", "vllm-router": "--vllm-pd-disaggregation"}
READY_SECONDS = 60.0


def clients() -> Path:
    """Where the environments of other programs are: FWK_CLIENTS, or the user's cache folder."""
    given = os.environ.get("FWK_CLIENTS")
    return Path(given) if given else Path.home() / ".cache" / "fwk" / "clients"


def python_of(package: str) -> Path:
    """The interpreter of a router's environment, if it was made."""
    return clients() / package / "bin" / "python"


class Router:
    """A router that chooses the servers' roles; killed and started again at one address."""

    def __init__(self, package: str, prefill: str, decode: str, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"{package}.log"
        own = ("--host", "127.0.0.1", "--port", str(port), "--health-check-interval-secs", "1")
        servers = ("--prefill", prefill, "--decode", decode)
        self._command = [str(python_of(package)), "-m", ROUTERS[package], MODES[package], *own, *servers]
        self._wanted = {prefill, decode}
        self._start()

    def _start(self) -> None:
        command = [*self._command, "--prometheus-port", str(free_port())]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._log.parent)
        until(self._is_ready, READY_SECONDS, "the router knows both servers", pause=0.2)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-3000:]
        try:
            told = httpx.get(f"{self.url}/workers", trust_env=False).json()["workers"]
        except (httpx.HTTPError, ValueError):
            return False
        return {worker["url"] for worker in told if worker["is_healthy"]} == self._wanted

    def restart(self) -> None:
        """Kill it, and start another."""
        self.close()
        self._start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
