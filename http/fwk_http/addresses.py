"""Where a server listens: a TCP port or a unix socket, with TLS or without."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import stat

SEND_BUFFER = 256 * 1024
"""Bytes of replies the system holds for each connection (Linux takes twice that); left alone it grows to megabytes."""

BACKLOG = 2048


class AddressTaken(Exception):
    """Nothing can listen there; the sentence says where and why."""


class BadCertificate(Exception):
    """A file does not serve for TLS; the sentence says why. ``is_authority``: of the authorities that clients need."""

    def __init__(self, sentence: str, is_authority: bool = False) -> None:
        super().__init__(sentence)
        self.is_authority = is_authority


def resolve(host: str, port: int) -> tuple[str, int]:
    """The address that ``bind`` takes. Raises ``AddressTaken``."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]
    except OSError as error:
        raise AddressTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return str(found[0]), int(found[1])


def bind(host: str, port: int) -> socket.socket:
    """Listen on a TCP port. Raises ``AddressTaken``."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(info[4])
        listener.listen(BACKLOG)
    except OSError as error:
        raise AddressTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def bind_path(path: str) -> socket.socket:
    """Listen on a unix socket, in place of one that a server which is gone has left. Raises ``AddressTaken``."""
    if os.path.lexists(path):
        _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressTaken(f"cannot listen on {path}: {error.strerror or error}") from None
    return listener


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise AddressTaken(f"cannot listen on {path}: it exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(path)
        raise AddressTaken(f"cannot listen on {path}: another server listens there")
    os.unlink(path)


def address(listener: socket.socket, is_tls: bool) -> str:
    """Where clients reach a server: a URL, or the path of the socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def tls_context(
    certificate: str, key: str | None = None, password: str | None = None, authorities: str | None = None
) -> ssl.SSLContext:
    """TLS 1.2 and newer, of PEM files. ``authorities``: whose certificates clients need. Raises ``BadCertificate``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An empty password is an error; asking for one would wait for a terminal.
        context.load_cert_chain(certificate, key, password if password is not None else "")
    except (OSError, ValueError) as error:
        raise BadCertificate(f"no certificate with its private key could be read ({_reason(error)})") from None
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            raise BadCertificate(_reason(error), is_authority=True) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not a PEM file").lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)
