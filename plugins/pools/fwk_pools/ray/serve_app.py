"""fwk behind Ray Serve: each replica is a ``fwk serve`` of its own, so all its APIs are there.

Ray Serve has the address, the replicas and their number; fwk has the rest.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ray import serve

START_SECONDS = 600.0
OF_ONE_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade"})
"""Headers that are not passed on."""


PR_SET_PDEATHSIG = 1
"""Linux's number of the request to prctl, from its headers."""

_LIBC = ctypes.CDLL(None)


def _end_with_replica() -> None:
    """Of the server's process: a replica that is killed leaves none behind."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class AppOptions(BaseModel):
    """``NAME=VALUE`` after ``serve run fwk_pools.ray:app``; further ones are options of ``fwk serve``."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: int = Field(16, ge=1)
    max_ongoing_requests: int = Field(256, ge=1)
    cpus_per_replica: float = Field(1, gt=0)
    gpus_per_replica: float = Field(0, ge=0)


@serve.deployment(health_check_period_s=5, graceful_shutdown_timeout_s=30)
class FwkServer:
    """One ``fwk serve`` and the requests that Ray Serve sends it."""

    def __init__(self, words: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "fwk", "serve", *words, "--host", "127.0.0.1", "--port", str(port)]
        self._process = subprocess.Popen(command, preexec_fn=_end_with_replica)
        address, unlimited = f"http://127.0.0.1:{port}", httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=address, timeout=None, limits=unlimited, trust_env=False)
        self._wait(address)

    async def __call__(self, request: Request) -> Response:
        """Pass on a request and its reply, which is streamed where it is a stream."""
        headers = [(name, value) for name, value in request.headers.raw if name.decode().lower() not in OF_ONE_HOP]
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        sent = self._client.build_request(request.method, url, headers=headers, content=await request.body())
        reply = await self._client.send(sent, stream=True)
        kept = {name: value for name, value in reply.headers.items() if name.lower() not in OF_ONE_HOP}
        return StreamingResponse(reply.aiter_raw(), reply.status_code, kept, background=BackgroundTask(reply.aclose))

    async def check_health(self) -> None:
        """What it raises has Ray Serve start another replica."""
        if self._process.poll() is not None:
            raise RuntimeError(f"fwk serve has ended with exit code {self._process.returncode}")
        (await self._client.get("/health", timeout=5)).raise_for_status()

    def _wait(self, address: str) -> None:
        """Until it serves: the replica takes no requests before."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"fwk serve has ended with exit code {self._process.returncode}: see its log")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{address}/ready", timeout=1, trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"fwk serve has not started in {START_SECONDS:g} seconds")

    def __del__(self) -> None:
        self._process.terminate()


def application(options: AppOptions) -> Any:
    """The application, with as many replicas as its requests need."""
    words = [options.model] if options.model is not None else []
    for name, value in (options.model_extra or {}).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    deployment: Any = FwkServer  # what the decorator made of it, which its types do not tell
    return deployment.options(
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": max(options.min_replicas, options.max_replicas),
            "target_ongoing_requests": options.target_ongoing_requests,
        },
        max_ongoing_requests=options.max_ongoing_requests,
        ray_actor_options={"num_cpus": options.cpus_per_replica, "num_gpus": options.gpus_per_replica},
    ).bind(words)
