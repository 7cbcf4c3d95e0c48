"""The actor: starts an engine's process on its node, and passes on what goes to it and comes from it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

import zmq
import zmq.asyncio

import ray

STOP_SECONDS = 3.0


class EngineActor:
    """One engine's process. Its calls are coroutines, begun in the order in which the relay makes them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._frames: list[bytes] = []
        self._news = asyncio.Event()
        self._code: int | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def place(self) -> tuple[str, int]:
        """The address of its node, and its process there."""
        return ray.util.get_node_ip_address(), os.getpid()

    async def start(self, spec: dict[str, Any], environment: dict[str, str]) -> None:
        """Start the engine that ``spec``, a ``LaunchSpec`` of core's, describes; its address is chosen here."""
        self._folder = tempfile.mkdtemp(prefix="fwk-ray-")
        address = f"ipc://{self._folder}/engine.sock"
        command = [sys.executable, "-P", "-m", "fwk.engine.process"]
        ours = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=ours, bufsize=0)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**spec, "address": address}).encode() + b"\n")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, spec["client"].encode())
        for unbounded in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(unbounded, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.connect(address)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    async def send(self, messages: list[bytes]) -> None:
        """Messages for the engine."""
        assert self._socket is not None
        await self._socket.send_multipart(messages)

    async def receive(self) -> tuple[list[bytes], int | None]:
        """What the engine has sent, once there is something; and its exit code, once it has ended."""
        await self._news.wait()
        frames, self._frames = self._frames, []
        if self._code is None:
            self._news.clear()
        return frames, self._code

    async def _listen(self) -> None:
        assert self._socket is not None
        while True:
            frames = await self._socket.recv_multipart()
            self._frames += frames  # not in one line: the list may be another one by then
            self._news.set()

    async def _watch(self) -> None:
        assert self._process is not None
        code = await asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        await asyncio.sleep(0.05)  # its last words may still be on the wire
        self._code = code
        self._news.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def close(self) -> None:
        """End the engine, which has been asked to."""
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGKILL)
