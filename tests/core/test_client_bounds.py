"""Clients of other servers: no reply that never ends, is compressed, slow or leads elsewhere harms one."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import math
import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.helpers.sources import FILES, ROOT

from fwk.interfaces.loader import LoaderContext
from fwk.interfaces.observer import ObserverContext
from fwk.plugins import discover
from fwk_http import clients
from fwk_http.clients import Allowance, BadReply
from fwk_kit.bench import load, servers
from fwk_kit.bench.workload import Asked, Workload
from fwk_kit.cli import plugin_doctor, remote_chat, run_batch
from fwk_kv_transfer.remote_prefill.posting import PeerError, post
from fwk_loaders.hub.source import HubSource
from fwk_observability.otel import OtelOptions
from fwk_observability.prometheus import PrometheusOptions
from fwk_server.openai_responses.tool_servers import ToolServer, _reason

MEBI = 2**20
SECRET = "internal.example/secret"
ENDS = {
    "endless": b"content-type: application/json\r\n\r\n[" + b" " * 16,
    "endless headers": b"x-more: ",
    "events": b"content-type: text/event-stream\r\n\r\n: ",
    "an event": b"content-type: text/event-stream\r\n\r\ndata: ",
    "compressed": b"content-type: application/json\r\ncontent-encoding: gzip\r\n\r\n" + gzip.compress(bytes(64 * MEBI)),
    "slow": b"content-type: application/json\r\n\r\n",
}


class Hostile(socketserver.ThreadingTCPServer):
    """An HTTP server that answers every request alike, and counts the bytes that its clients take."""

    daemon_threads = True
    kind = ""
    num_bytes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Hostile)
        kind = self.server.kind
        with contextlib.suppress(OSError):
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            if kind == "redirect":
                head = f"307 Elsewhere\r\nlocation: http://{SECRET}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                self.wfile.write(b"HTTP/1.1 " + head.encode())
                return
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + ENDS[kind])
            piece = b" " if kind == "slow" else b" " * 65_536
            while kind != "compressed":
                self.wfile.write(piece)
                self.server.num_bytes += len(piece)
                time.sleep(0.05 if kind == "slow" else 0)


@contextlib.contextmanager
def hostile(kind: str) -> Iterator[Hostile]:
    with Hostile(("127.0.0.1", 0), Answer) as found:
        found.kind = kind
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def failure(call: Callable[[], None]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")


def listed(url: str, tmp_path: Path) -> None:
    asyncio.run(ToolServer("a", f"{url}/mcp", None, 0.3).list())


def heard(url: str, tmp_path: Path) -> None:
    asyncio.run(ToolServer("a", f"{url}/sse", None, 0.3).list())


def ordered(url: str, tmp_path: Path) -> None:
    async def order() -> None:
        async with asyncio.timeout(0.3):
            raise PeerError((await post(url, "/", {}, b"", None)).status)  # what is not signed is not believed

    asyncio.run(order())


def fetched(url: str, tmp_path: Path) -> None:
    HubSource(LoaderContext()).fetch("org/name", None, tmp_path, lambda _: None)


def traced(url: str, tmp_path: Path) -> None:
    from opentelemetry.sdk.trace.export import SpanExportResult

    from fwk_observability.otel.observer import OtelObserver

    observer = OtelObserver(ObserverContext("model", OtelOptions(otlp_traces_endpoint=url)))
    try:
        if observer._exporter.export([]) is not SpanExportResult.SUCCESS:
            raise BadReply
    finally:
        observer.close()


def batched(url: str, tmp_path: Path) -> None:
    client = run_batch.Client(run_batch.to_url(url), None)
    with contextlib.closing(client):
        reply = client.answer(b'{"method": "POST", "url": "/v1/completions", "body": {}}', 1)
    if reply["response"]["status_code"] != 200 or "error" in reply["response"]["body"]:
        raise BadReply(json.dumps(reply))


def chatted(url: str, tmp_path: Path) -> None:
    if not "".join(remote_chat.remote(url, None, None)([], {})):
        raise BadReply("no text")


def loaded(url: str, tmp_path: Path) -> None:
    replies, _ = asyncio.run(load.run(url, Workload("S1", num_requests=1), [Asked("/", {}, 0.0, 1, 1)]))
    if replies[0].error is not None:
        raise BadReply(replies[0].error)


def named(url: str, tmp_path: Path) -> None:
    asyncio.run(load.served_model(url))


def looked_at(url: str, tmp_path: Path) -> None:
    findings = [finding.message for finding in plugin_doctor._server(discover(), url)]
    if findings:
        raise BadReply(" ".join(findings))


def counted(url: str, tmp_path: Path) -> None:
    if not servers.counters(url) and servers.fingerprint(url) is None:
        raise BadReply("no counters")


CLIENTS: dict[str, Callable[[str, Path], None]] = {
    "a tool server": listed,
    "a tool server's events": heard,
    "a prefill server": ordered,
    "the hub": fetched,
    "a collector": traced,
    "run-batch": batched,
    "chat": chatted,
    "bench": loaded,
    "bench's models": named,
    "doctor": looked_at,
    "bench's counters": counted,
}
BOUNDS: dict[ModuleType, dict[str, float]] = {
    run_batch: {"TRIES": 1, "SECONDS": 0.3, "MAX_REPLY_BYTES": 2 * MEBI},
    remote_chat: {"BYTES_PER_SECOND": 1024.0, "SECONDS": 0.3, "MAX_REPLY_BYTES": 2 * MEBI},
    load: {"BYTES_PER_SECOND": 1024.0, "REPLY_SECONDS": 0.3, "MODELS_SECONDS": 0.3, "MAX_REPLY_BYTES": 2 * MEBI},
    servers: {"PAGE_SECONDS": 0.3, "MAX_PAGE_BYTES": 2 * MEBI},
    plugin_doctor: {"INFO_SECONDS": 0.3},
}

SLOW = "a collector"
"""Its library tries again on its own."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.sweep) if n == SLOW else n for n in CLIENTS])
def test_no_reply_is_read_without_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = pytest.importorskip("huggingface_hub.constants")
    pytest.importorskip("fwk_server.openai_responses.mcp_client")
    monkeypatch.setattr(clients, "SECONDS", 0.2)
    monkeypatch.setattr(Allowance.__init__, "__defaults__", (0.2, 1024.0))
    monkeypatch.setattr("fwk_loaders.hub.source.MAX_ANSWER_BYTES", 2 * MEBI)
    for module, given in BOUNDS.items():
        for bound, value in given.items():
            monkeypatch.setattr(module, bound, value)
    caplog.set_level(logging.INFO)
    for kind in (*ENDS, "redirect"):
        with hostile(kind) as server:
            monkeypatch.setattr(hub, "ENDPOINT", server.url)
            monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", server.url, raising=False)
            error = failure(lambda url=server.url: CLIENTS[name](url, tmp_path))
            is_dropped = name.startswith("bench") and kind == "endless headers"  # aiohttp keeps none of the spaces
            assert is_dropped or server.num_bytes < 24 * MEBI, f"{kind}: {server.num_bytes} bytes were taken"
            if name != "the hub":  # which follows redirects
                told = "\n".join([str(error), _reason(error), *caplog.messages])
                assert SECRET not in told, f"{kind}: {told}"


def test_a_push_reads_no_body(caplog: pytest.LogCaptureFixture) -> None:
    from prometheus_client import CollectorRegistry

    from fwk_observability.prometheus.push import Push

    for kind in ("endless", "compressed", "redirect"):
        with hostile(kind) as server:
            options = PrometheusOptions(metric_gateway=server.url, metric_gateway_push_interval=3600.0)
            push = Push(CollectorRegistry(), options)
            push.close()
            assert push._is_failing == (kind == "redirect")
            assert server.num_bytes < 16 * MEBI
    assert SECRET not in caplog.text


def test_an_allowance_counts_bytes_and_time() -> None:
    allowed = Allowance(10, 5.0, 1.0)
    allowed.take(10)
    assert 14 < allowed.seconds_left < 15
    with pytest.raises(BadReply, match="more than 10 bytes"):
        allowed.take(1)
    with pytest.raises(BadReply, match="less than 1 bytes a second"):
        Allowance(10, -1.0, 1.0).take(0)
    with pytest.raises(BadReply, match="it took too long: more than -1 seconds"):
        Allowance(10, -1.0, math.inf).take(0)


CONNECTS = {
    "core/fwk/server/engine_client.py": "zmq, to the engine that it started",
    "plugins/kv_transfer/fwk_kv_transfer/_common/signed.py": "its own protocol, signed and bounded",
    "plugins/kv_transfer/fwk_kv_transfer/remote_prefill/posting.py": "Allowance",
    "plugins/multimodal/fwk_multimodal/media/encoder_servers.py": "Allowance",
    "plugins/server/fwk_server/openai_responses/mcp_client.py": "bound_httpx",
    "plugins/server/fwk_server/_common/records.py": "sqlite3, to a file",
    "plugins/cache/fwk_cache/_common/timed_socket.py": "a deadline for each command of redis and lmcache",
    "plugins/cache/fwk_cache/_common/remote_tier.py": "their protocols, with lines and sizes bounded",
    "plugins/pools/fwk_pools/ray/actor.py": "the engine's process, by a socket of its own folder",
    "plugins/pools/fwk_pools/ray/relay.py": "a look whether a cluster listens, then Ray; reads nothing",
    "plugins/pools/fwk_pools/ray/serve_app.py": "its own fwk serve, whose replies are passed on piece by piece",
    "plugins/observability/fwk_observability/prometheus/push.py": "reads no body, follows no redirect",
    "plugins/observability/fwk_observability/otel/observer.py": "bound_requests",
    "plugins/executors/fwk_executors/_common/torch_group.py": "torch, to the other ranks of one engine",
    "plugins/executors/fwk_executors/ray/cluster.py": "a look whether a cluster listens, then Ray; reads nothing",
    "plugins/executors/fwk_executors/processes/member.py": "nodes, by their secret",
    "plugins/loaders/fwk_loaders/remote_instance/connection.py": "deadlines, and sizes that its index tells",
    "plugins/loaders/fwk_loaders/hub/source.py": "bound_httpx",
    "plugins/loaders/fwk_loaders/wheel/index.py": "bound_httpx",
    "kit/fwk_kit/cli/remote_chat.py": "pieces_of",
    "kit/fwk_kit/cli/run_batch.py": "pieces_of",
    "kit/fwk_kit/cli/plugin_doctor.py": "pieces_of",
    "kit/fwk_kit/bench/servers.py": "pieces_of",
    "kit/fwk_kit/bench/load.py": "Allowance",
    "kit/fwk_kit/testing/serving.py": "the server that a test has started",
    "http/fwk_http/clients.py": "open_here, of which pieces_of reads",
    "http/fwk_http/fetch.py": "Allowance, and a timer that cuts the connection",
    "http/fwk_http/handover.py": "the server before, of the same user",
    "http/fwk_http/addresses.py": "a look whether a server listens on a socket's path; reads nothing",
}
"""Files that open connections or start what does, and what bounds the replies."""

OPENS = re.compile(
    r"create_connection|open_connection|open_unix_connection|\.connect\(|HTTPConnection\(|build_opener|urlopen|open_here\(|"
    r"import (requests|httpx2?|aiohttp|urllib3)\b|snapshot_download|hf_hub_download|sse_client|streamable_http_client|"
    r"push_to_gateway|OTLPSpanExporter|init_process_group|TCPStore|websockets|grpc"
)


def test_every_place_that_opens_a_connection_is_known() -> None:
    files = [*FILES, *(ROOT / "kit").rglob("*.py")]
    found = [path.relative_to(ROOT).as_posix() for path in files if OPENS.search(path.read_text())]
    unknown = [name for name in found if not name.startswith(tuple(CONNECTS))]
    assert not unknown, f"bound what these read (fwk_http.clients), and list them: {unknown}"
    stale = [known for known in CONNECTS if not any(name.startswith(known) for name in found)]
    assert not stale, stale
