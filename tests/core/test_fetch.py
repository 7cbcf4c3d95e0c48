"""What URLs of clients name is fetched from listed hosts, at public addresses, within bounds."""

from __future__ import annotations

import gzip
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fwk.errors import ConfigError, InvalidRequest, NotServed
from fwk_http.clients import BadReply
from fwk_http.fetch import Hosts, Refused, fetch
from fwk_multimodal.media import MediaOptions
from fwk_multimodal.media.reader import MAX_FETCHES, MediaReader

OK = b"HTTP/1.1 200 OK\r\n"


class Answers(socketserver.ThreadingTCPServer):
    """Answers each path with bytes, in pieces with pauses between."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.paths: dict[str, list[bytes | float]] = {}
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Answers)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.rfile.readline()
        self.server.heads.append(head)
        try:
            for piece in self.server.paths[head.split()[1].decode()]:
                if isinstance(piece, bytes):
                    self.wfile.write(piece)
                else:
                    time.sleep(piece)
        except OSError:
            pass


@pytest.fixture
def server() -> Iterator[Answers]:
    answers = Answers()
    yield answers
    answers.shutdown()
    answers.server_close()


def test_content_comes_whole_and_over_redirects(server: Answers) -> None:
    body = b"x" * 200_000
    server.paths["/a?b=c"] = [OK + b"content-length: 200000\r\n\r\n", body]
    server.paths["/open"] = [OK + b"\r\n", body]
    server.paths["/moved"] = [b"HTTP/1.1 302 Found\r\nlocation: /open\r\n\r\n"]
    hosts = Hosts([server.host])
    for path in ("/a?b=c", "/open", "/moved"):
        assert fetch(f"http://{server.host}{path}", hosts, 200_000) == body
    assert all(b"\r\nAccept-Encoding: identity\r\n" in head for head in server.heads)
    assert all(f"\r\nHost: {server.host}\r\n".encode() in head for head in server.heads)


BAD: dict[str, tuple[list[bytes | float], str]] = {
    "not found": ([b"HTTP/1.1 404 Not Found\r\n\r\n"], "its server answered with status 404"),
    "too large": ([OK + b"content-length: 1001\r\n\r\n"], "more than 1000 bytes"),
    "larger than said": ([OK + b"\r\n", b"x" * 1001], "more than 1000 bytes"),
    "endless": ([OK + b"\r\n", *[b"x" * 1000] * 50], "more than 1000 bytes"),
    "compressed": ([OK + b"content-encoding: gzip\r\n\r\n", gzip.compress(bytes(10**6))], "it sent a compressed reply"),
    "cut short": ([OK + b"content-length: 100\r\n\r\n", b"x"], "its server stopped before the end"),
    "silent": ([1.0], "its server took too long"),
    "a slow head": ([OK, *[b"x: y\r\n", 0.05] * 30], "its server took too long"),
    "a slow body": ([OK + b"content-length: 100\r\n\r\n", *[b"x", 0.05] * 30], "took too long|before the end"),
    "no HTTP": ([b"SSH-2.0-OpenSSH\r\n"], "its server did not answer as one does"),
    "an endless head": ([OK + b"x: " + b"y" * 10**6], "its server did not answer as one does"),
    "many headers": ([OK, b"x: y\r\n" * 10_000], "its server did not answer as one does"),
    "moved to a file": ([b"HTTP/1.1 301 M\r\nlocation: file:///etc/passwd\r\n\r\n"], "it is no http: or https: URL"),
    "moved elsewhere": (
        [b"HTTP/1.1 307 M\r\nlocation: http://localhost:1/\r\n\r\n"],
        "its host is none that this server",
    ),
    "in circles": ([b"HTTP/1.1 308 M\r\nlocation: /\r\n\r\n"], "it leads on more than 3 times"),
}


@pytest.mark.parametrize(("answer", "message"), BAD.values(), ids=BAD)
def test_bad_answers_are_bounded(server: Answers, answer: list[bytes | float], message: str) -> None:
    server.paths["/"] = answer
    seconds = 0.6 if any(isinstance(piece, float) for piece in answer) else 5.0  # a busy machine is slow by itself
    started = time.monotonic()
    with pytest.raises((BadReply, Refused), match=message):
        fetch(f"http://{server.host}/", Hosts([server.host]), 1000, seconds=seconds)
    assert time.monotonic() - started < 5


def test_of_a_server_that_is_not_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(BadReply, match="its server did not answer"):
            fetch(f"http://{host}/", Hosts([host]), 10)


NOT_FETCHED = [
    ("ftp://example.org/a", "no http: or https: URL"),
    ("http:///a", "no http: or https: URL"),
    ("http://example.org/a b", "no http: or https: URL"),
    ("http://example.org/a\r\nx: y", "no http: or https: URL"),
    ("http://example.org/" + "a" * 9000, "no http: or https: URL"),
    ("http://example.org:99999/", "it is no URL"),
    ("http://[::1/", "it is no URL"),
    ("http://user:pass@example.org/", "URLs with a user's name or password"),
    ("http://elsewhere.org/", "its host is none that"),
    ("http://example.org.evil.net/", "its host is none that"),
    ("http://evilexample.org/", "its host is none that"),
    ("http://example.org:8080/", "its host is none that"),
    ("http://below.org/", "its host is none that"),
    ("http://127.0.0.1/", "its host is none that"),
    ("http://2130706433/", "its host is none that"),
    ("http://0x7f.1/", "its host is none that"),
    ("http://[::ffff:127.0.0.1]/", "its host is none that"),
]


@pytest.mark.parametrize(("url", "message"), NOT_FETCHED)
def test_other_urls_are_refused_before_anything_is_looked_up(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail("looked up"))
    with pytest.raises(Refused, match=message):
        fetch(url, Hosts(["example.org", "*.below.org"]), 10)


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
    "ff02::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_names_at_private_addresses_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of several is."""
    found = [(0, 0, 0, "", ("93.184.216.34", 80)), (0, 0, 0, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: found)
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("connected"))
    with pytest.raises(Refused, match="not at a public address"):
        fetch("http://example.org/", Hosts(["example.org", address if ":" not in address else f"[{address}]"]), 10)


def test_the_connection_goes_to_what_was_looked_up(server: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: a name server that answers otherwise the second time is not asked."""
    server.paths["/"] = [OK + b"\r\nabc"]
    connect, looked, asked = socket.create_connection, [], []

    def look(*args: Any, **named: Any) -> list[Any]:
        looked.append(args)
        return [(0, 0, 0, "", ("93.184.216.34" if len(looked) == 1 else "127.0.0.1", 80))]

    def connected(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address)
        monkeypatch.setattr(socket, "getaddrinfo", real)
        return connect(("127.0.0.1", server.server_address[1]), timeout)

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr(socket, "create_connection", connected)
    assert fetch("http://example.org/", Hosts(["example.org"]), 10) == b"abc"
    assert (len(looked), asked) == (1, [("93.184.216.34", 80)])
    assert b"\r\nHost: example.org\r\n" in server.heads[0]


@pytest.mark.parametrize("entry", ["", "*", "a*b.org", "https://example.org", "example.org/a", "u@example.org", "x:y"])
def test_wrong_hosts_are_named(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-media-hosts: .* is no host: say example\.org"):
        MediaReader(MediaOptions(allowed_media_hosts=(entry,)))


def test_the_reader_fetches_and_says_whose_fault_it_is(server: Answers) -> None:
    server.paths = {"/a.png": [OK + b"\r\nabc"], "/large": [OK + b"\r\n" + b"x" * 100]}
    reader = MediaReader(MediaOptions(allowed_media_hosts=(server.host,), max_media_bytes=50))
    assert reader.read(f"http://{server.host}/a.png", "it") == b"abc"
    for path, message in (
        ("/large", "it is not fetched: it sent more than 50 bytes"),
        ("/none", "it is not fetched: "),
    ):
        with pytest.raises(InvalidRequest, match=message) as caught:
            reader.read(f"http://{server.host}{path}", "it")
        assert caught.value.param == "it"
    for _ in range(MAX_FETCHES):
        assert reader._fetching.acquire(blocking=False)
    with pytest.raises(NotServed, match="as many as may be at once"):
        reader.read(f"http://{server.host}/a.png", "it")
    with pytest.raises(InvalidRequest, match="it is no data: URL: this server fetches nothing"):
        MediaReader(MediaOptions()).read(f"http://{server.host}/a.png", "it")
