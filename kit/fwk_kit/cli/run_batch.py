"""``fwk run-batch``: the requests of a file in OpenAI's batch format, and their replies in another, without a server
that stays.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

from fwk.cli.common import note
from fwk.errors import ConfigError, EngineDead
from fwk_files.regular import open_regular
from fwk_http.clients import Allowance, pieces_of
from fwk_kit.cli.output import check_output
from fwk_process.progress import offline_bar, set_up_progress

TRIES = 8
"""Of a request that the server cannot take now."""

SECONDS = 3600.0
"""In which a reply has to come."""

MAX_REPLY_BYTES = 256 * 2**20
"""Of one reply: the embeddings of a large request have tens of megabytes."""

Connect = Callable[[], http.client.HTTPConnection]


def run(argv: Sequence[str]) -> int:
    """Answer every line. Exit code 1 when one got an error."""
    parser = argparse.ArgumentParser(
        "fwk run-batch",
        description="Answer the requests of a file in OpenAI's batch format. All other flags are those of fwk serve.",
        allow_abbrev=False,
    )
    parser.add_argument("-i", "--input-file", required=True, help="JSON lines with custom_id, method, url and body; -")
    parser.add_argument("-o", "--output-file", required=True, help="where the replies go, in the order of the input; -")
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8000; else one is started for this")
    parser.add_argument("--key", help="API key of that server")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time (default: %(default)s)")
    parser.add_argument("--disable-progress-bars", action="store_true", help="draw none, on a terminal either")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1")
    if arguments.url and rest:
        raise ConfigError(f"{rest[0]} is for a server that is started here, but --url names one that runs")
    if arguments.output_file != "-":
        _check_target(arguments.output_file)
    set_up_progress(not arguments.disable_progress_bars)
    with contextlib.ExitStack() as stack:
        source = sys.stdin.buffer if arguments.input_file == "-" else stack.enter_context(_opened(arguments))
        connect = to_url(arguments.url) if arguments.url else stack.enter_context(_served(rest))
        target = _target(arguments.output_file, stack)
        client = stack.enter_context(contextlib.closing(Client(connect, arguments.key)))
        counts = answer_all(source, target, client, arguments.concurrency)
    note(f"{counts[0]} requests answered, {counts[1]} with an error")
    return 1 if counts[1] else 0


def answer_all(source: Iterable[bytes], target: IO[bytes], client: Client, concurrency: int) -> tuple[int, int]:
    """Write a line for each of ``source``, in its order: how many there were, and how many got an error."""
    done: deque[Future[dict[str, Any]]] = deque()
    num_errors = count = 0

    def write() -> int:
        line = done.popleft().result()
        bar.add()
        target.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        return line["response"]["status_code"] != 200

    with offline_bar("requests", None, None) as bar, ThreadPoolExecutor(concurrency) as threads:
        for data in source:
            if not data.strip():
                continue
            count += 1
            done.append(threads.submit(client.answer, data, count))
            while len(done) >= 4 * concurrency or (done and done[0].done()):
                num_errors += write()
        while done:
            num_errors += write()
    target.flush()
    return count, num_errors


class Client:
    """Asks a server, with a connection for each thread."""

    def __init__(self, connect: Connect, key: str | None) -> None:
        self._connect = connect
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._own = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()

    def answer(self, data: bytes, number: int) -> dict[str, Any]:
        """The output's line for an input's."""
        name = None
        try:
            line = json.loads(data)
            name = line.get("custom_id")
            status, body = self._ask(_url(line), json.dumps(line["body"]).encode())
        except (ValueError, KeyError, AttributeError, RecursionError) as error:
            what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            status, body = 400, {"error": {"message": f"line {number}: {what}", "type": "invalid_request_error"}}
        response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
        return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": name, "response": response, "error": None}

    def _ask(self, url: str, body: bytes) -> tuple[int, Any]:
        status, headers, data = self._try(url, body)
        for attempt in range(1, TRIES):
            if status not in (429, 503):
                break
            time.sleep(_pause(headers.get("retry-after", "")) * attempt / 2)
            status, headers, data = self._try(url, body)
        try:
            return status, json.loads(data)
        except ValueError:
            return status, {"error": {"message": data[:200].decode(errors="replace")}}

    def _try(self, url: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        try:
            return self._post(url, body)
        except (OSError, http.client.HTTPException) as error:
            self._own.connection.close()  # it connects again when it is used
            return 503, {}, json.dumps({"error": {"message": str(error)}}).encode()

    def _post(self, url: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._connect()
            self._connections.append(connection)
        connection.request("POST", url, body, self._headers)
        response = connection.getresponse()
        body = b"".join(pieces_of(response, Allowance(MAX_REPLY_BYTES, SECONDS)))
        return response.status, {name.lower(): value for name, value in response.getheaders()}, body


def _pause(told: str) -> float:
    """Seconds to wait before the next try, of a header that may hold anything."""
    return min(float(told), 5.0) if told.isascii() and told.isdecimal() else 0.5


def _url(line: dict[str, Any]) -> str:
    if line.get("method") != "POST":
        raise ValueError("method must be POST")
    url = line["url"]
    if not isinstance(url, str) or not url.startswith("/") or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("url must be a path such as /v1/chat/completions")
    if not isinstance(line["body"], dict) or cast(dict[str, Any], line["body"]).get("stream"):
        raise ValueError("body must be an object, and not ask for a stream")
    return url


def _opened(arguments: argparse.Namespace) -> IO[bytes]:
    try:
        return open_regular(arguments.input_file)
    except (OSError, ValueError) as error:  # a null byte
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--input-file: cannot read {arguments.input_file!r:.300}: {why}; - is standard input"
        ) from None


def _check_target(path: str) -> None:
    """Before a server is started; an older file stays as it is until that one serves."""
    try:
        check_output(Path(path))
    except OSError as error:
        raise ConfigError(f"--output-file: cannot write {path}: {error.strerror}") from None


def _target(path: str, stack: contextlib.ExitStack) -> IO[bytes]:
    if path == "-":
        return sys.stdout.buffer
    try:
        return stack.enter_context(Path(path).open("wb"))
    except OSError as error:
        raise ConfigError(f"--output-file: cannot write {path}: {error.strerror}") from None


def to_url(text: str) -> Connect:
    """Connections to a server."""
    url = urllib.parse.urlsplit(text if "//" in text else f"http://{text}")
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return lambda: kind(url.netloc, timeout=SECONDS)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextlib.contextmanager
def _served(flags: Sequence[str]) -> Iterator[Connect]:
    """A server of our own on a unix socket; its log goes where ours goes."""
    with tempfile.TemporaryDirectory(prefix="fwk-batch-") as folder:
        path = f"{folder}/socket"
        command = [sys.executable, "-P", "-m", "fwk", "serve", *flags, "--uds", path]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as server:
            try:
                while not _is_ready(path):
                    if server.poll() is not None:
                        raise EngineDead(f"the server ended before it served (exit code {server.returncode})")
                    time.sleep(0.1)
                yield lambda: _UnixConnection(path)
            finally:
                server.terminate()


def _is_ready(path: str) -> bool:
    connection = _UnixConnection(path)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
