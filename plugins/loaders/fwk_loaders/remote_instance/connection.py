"""HTTP to the seed with deadlines: for a whole answer, whatever pieces it comes in."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Generator, Mapping
from typing import Any

from fwk.errors import ModelLoadError

MAX_ERROR_BYTES = 65_536
READ_AHEAD = 65_536


class _Deadline:
    """When what is under way must be over."""

    def __init__(self) -> None:
        self._end = 0.0

    def set(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds. Raises ``TimeoutError`` when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Reader(io.RawIOBase):
    """A socket's bytes, each piece within what is left of the deadline: a trickle ends as silence does."""

    def __init__(self, owner: _Socket) -> None:
        self._owner = owner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._owner.receive(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._owner.forget(self)


class _Socket:
    """What ``http.client`` needs of a socket: it lasts as long as an answer is being read, as real ones do."""

    def __init__(self, source: socket.socket, deadline: _Deadline) -> None:
        self._source, self._deadline = source, deadline
        self._is_closing = False
        self._readers: list[_Reader] = []

    def sendall(self, data: bytes) -> None:
        self._source.settimeout(self._deadline.left())
        self._source.sendall(data)

    def receive(self, buffer: Any) -> int:
        self._source.settimeout(self._deadline.left())
        return self._source.recv_into(buffer)

    def makefile(self, *_: Any) -> io.BufferedReader:
        self._readers.append(_Reader(self))
        return io.BufferedReader(self._readers[-1], READ_AHEAD)

    def forget(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        if self._is_closing and not self._readers:
            self._source.close()

    def close(self) -> None:
        self._is_closing = True
        if not self._readers:
            self._source.close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, deadline: _Deadline) -> None:
        super().__init__(host, port)
        self._tls, self._deadline = tls, deadline

    def connect(self) -> None:
        source = socket.create_connection((self.host, self.port), self._deadline.left())
        try:
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                source.settimeout(self._deadline.left())
                source = self._tls.wrap_socket(source, server_hostname=self.host)
        except BaseException:
            source.close()
            raise
        self.sock: Any = _Socket(source, self._deadline)


class Seed:
    """One server, and at most one connection to it. Every failure is a ``ModelLoadError`` that names it."""

    def __init__(self, host: str, port: int, key: str | None, timeout: float) -> None:
        """host: a name or an address, after ``https://`` for TLS with a certificate of a known authority."""
        scheme, _, name = host.rpartition("://")
        self._tls = ssl.create_default_context() if scheme == "https" else None
        self._host, self._port = name.removeprefix("[").removesuffix("]"), port
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.name = f"the seed {scheme or 'http'}://{shown}:{port}"
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._timeout = timeout
        self._deadline = _Deadline()
        self._connection: _Connection | None = None

    def close(self) -> None:
        """End the connection; the next request makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def refusal(self, why: str) -> ModelLoadError:
        """The sentence for a failure."""
        self.close()
        return ModelLoadError(f"{self.name} {why}")

    def wait(self) -> None:
        """From now on the seed has its time again."""
        self._deadline.set(self._timeout)

    def json(self, path: str, max_bytes: int) -> Any:
        """The body of a GET, of at most ``max_bytes``."""
        answer = self.get(path)
        with self.told():
            body = answer.read(max_bytes + 1)
        if len(body) > max_bytes:
            raise self.refusal(f"sent more than {max_bytes // 2**20} MiB for {path}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self.refusal(f"answered {path} with what is no JSON: is it a server of fwk?") from None

    def get(self, path: str) -> http.client.HTTPResponse:
        """The answer to a GET, of which the body is still to be read, within ``wait``'s time."""
        answer: http.client.HTTPResponse | None = None
        if self._connection is not None:
            try:
                with self.told(is_retried=True):
                    answer = self._request(path)
            except (ConnectionError, http.client.BadStatusLine):  # it has closed a connection that was idle
                self.close()
        if answer is None:
            with self.told():
                answer = self._request(path)
        if answer.status != 200:
            raise self._failed(path, answer)
        return answer

    def _request(self, path: str) -> http.client.HTTPResponse:
        self.wait()
        if self._connection is None:
            self._connection = _Connection(self._host, self._port, self._tls, self._deadline)
        self._connection.request("GET", path, headers=self._headers)
        return self._connection.getresponse()

    def _failed(self, path: str, answer: http.client.HTTPResponse) -> ModelLoadError:
        with self.told():
            said = _message(answer.read(MAX_ERROR_BYTES))
        if answer.status in (401, 403):
            return self.refusal(
                "refuses the key: --remote-instance-weight-loader-seed-api-key must be its --admin-api-key, and it "
                "must have been started with one"
            )
        if answer.status == 404 and "?" not in path:
            return self.refusal(
                "gives out no weights: it must be a server of fwk that was started with --admin-api-key"
            )
        return self.refusal(f"refuses ({answer.status}): {said}")

    @contextlib.contextmanager
    def told(self, is_retried: bool = False) -> Generator[None, None, None]:
        """Failures of the connection in words; those that ``get`` tries again after pass."""
        try:
            yield
        except TimeoutError:
            raise self.refusal(
                f"is too slow: nothing whole came within {self._timeout:g} seconds "
                "(--remote-instance-weight-loader-timeout)"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            if is_retried and isinstance(error, (ConnectionError, http.client.BadStatusLine)):
                raise
            raise self.refusal(_trouble(error)) from error


def _trouble(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "cannot be reached: nothing listens there"
    if isinstance(error, ssl.SSLError):
        return f"cannot be reached by HTTPS: {error.reason or error}"
    if isinstance(error, (http.client.IncompleteRead, ConnectionError)):
        return "ended the connection before its answer was whole"
    if isinstance(error, http.client.HTTPException):
        return f"does not answer in HTTP ({type(error).__name__})"
    if isinstance(error, OSError):
        return f"cannot be reached: {error.strerror or error}"
    return f"does not answer in HTTP ({error})"


def _message(body: bytes) -> str:
    """The sentence in an error of a server of fwk, else the beginning of what came."""
    try:
        found = json.loads(body)
        found = found["error"]
        found = found["message"] if isinstance(found, Mapping) else found
    except (ValueError, KeyError, TypeError, RecursionError):
        found = body[:200].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else " " for c in str(found)[:500])
