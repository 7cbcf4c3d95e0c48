"""Servers that give weights out: the real routes over a folder, in a thread, and one that sends given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastapi import FastAPI

from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.loader import Checkpoint, LoaderContext
from fwk.interfaces.served_weights import ServedWeights
from fwk.server.app import install_error_handlers
from fwk.server.route_registry import RouteRegistry
from fwk_http.keys import Keys
from fwk_kit.testing.fake_frontend import FakeFrontend
from fwk_loaders.remote_instance import RemoteInstanceOptions
from fwk_loaders.remote_instance.loader import RemoteInstanceLoader
from fwk_loaders.safetensors.loader import SafetensorsLoader
from fwk_server.tgi import TGIOptions
from fwk_server.tgi.dialect import TGIDialect
from tests.helpers.http_app import listening


class SeedFrontend(FakeFrontend):
    """A server of these weights."""

    served_weights: ServedWeights | None = None  # type: ignore[assignment]


def noted(folder: Path) -> ServedWeights:
    """The files of a folder as they are now."""
    return ServedWeights.of("safetensors", SafetensorsLoader(LoaderContext()).open(folder))


def seed_app(frontend: SeedFrontend) -> FastAPI:
    """The routes, which ask for no key here."""
    app = FastAPI()
    routes = RouteRegistry(app, Keys(admin="the administrator's"))
    dialect = TGIDialect(DialectContext(frontend, TGIOptions()))
    routes.register("tgi", dialect.routes, dialect.admin_routes, dialect=dialect)
    install_error_handlers(app, routes.error_body)
    return app


@contextlib.contextmanager
def seed_of(folder: Path) -> Iterator[tuple[int, SeedFrontend]]:
    """Serve a folder's weights; its port, and the frontend to change them by."""
    frontend = SeedFrontend()
    frontend.served_weights = noted(folder)
    ready, ports = threading.Event(), list[int]()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def main() -> None:
        async with listening(seed_app(frontend), lifespan="off") as url:
            ports.append(int(url.rpartition(":")[2]))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert ready.wait(20)
        yield ports[0], frontend
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(20)
        loop.close()


Said = Iterable[bytes | float]
Script = Callable[[str, dict[str, str]], Said | None]
"""What is sent for a path and its query, with pauses in seconds; the connection ends then. None: hang up at once."""


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server: Any = self.server
        with contextlib.suppress(OSError):
            while True:
                first = self.rfile.readline()
                if not first:
                    return
                while self.rfile.readline() not in (b"\r\n", b""):
                    pass
                server.num_requests += 1
                parts = urlsplit(first.split()[1].decode())
                said = server.script(parts.path, {key: one for key, (one,) in parse_qs(parts.query).items()})
                keeps = False
                for piece in said or ():
                    if isinstance(piece, bytes):
                        self.wfile.write(piece)
                        self.wfile.flush()
                    elif piece < 0:
                        keeps = True
                    elif server.stopped.wait(piece):
                        return
                if not keeps:
                    return


KEEP = -1.0
"""In a script: the connection stays open for the next request."""


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, script: Script, tls: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tls = tls
        self.script = script
        self.num_requests = 0
        self.stopped = threading.Event()

    def get_request(self) -> tuple[socket.socket, Any]:
        source, address = super().get_request()
        if self.tls is not None:  # hands are shaken by the thread of the connection
            source = self.tls.wrap_socket(source, server_side=True, do_handshake_on_connect=False)
        return source, address


@contextlib.contextmanager
def scripted_seed(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[_Server]:
    """A server that is no server; ``server_address[1]`` is its port."""
    with _Server(script, tls) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.stopped.set()
            server.shutdown()
            thread.join(20)


def http(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """A whole answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def receive(folder: Path, port: int, **options: Any) -> Checkpoint:
    """Open a folder by the loader."""
    given = {"seed_instance_ip": "127.0.0.1", "seed_instance_service_port": port, "timeout": 20.0} | options
    named = RemoteInstanceOptions(**{f"remote_instance_weight_loader_{name}": value for name, value in given.items()})
    return RemoteInstanceLoader(LoaderContext(named)).open(folder)
