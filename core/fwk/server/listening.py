"""Where the server listens: a TCP port or a unix socket, with TLS or without."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import stat
from pathlib import Path

from fwk.config import ServerOptions
from fwk.errors import ConfigError, PortTaken

SEND_BUFFER = 256 * 1024
"""Bytes of replies the system holds for each connection (Linux takes twice that); left alone it grows to megabytes."""

BACKLOG = 2048


def listen(options: ServerOptions) -> socket.socket:
    """Take the address before anything slow is done. Raises ``PortTaken`` when it is not to be had."""
    return bind_path(options.uds) if options.uds is not None else bind(options.host, options.port)


def bind(host: str, port: int) -> socket.socket:
    """Listen on a TCP port. Raises ``PortTaken``."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(info[4])
        listener.listen(BACKLOG)
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from None
    return listener


def bind_path(path: str) -> socket.socket:
    """Listen on a unix socket, in place of one that a server which is gone has left. Raises ``PortTaken``."""
    if os.path.lexists(path):
        _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {path}: {error.strerror or error}; choose another --uds") from None
    return listener


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise PortTaken(f"cannot listen on {path}: it exists and is no socket; choose another --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(path)
        raise PortTaken(f"cannot listen on {path}: another server listens there; choose another --uds")
    os.unlink(path)


def forget(options: ServerOptions) -> None:
    """Remove the file of a unix socket, when the server that listened there ends."""
    if options.uds is not None:
        Path(options.uds).unlink(missing_ok=True)


def address(listener: socket.socket, options: ServerOptions) -> str:
    """Where clients reach the server: a URL, or the path of the socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile is not None else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_public(options: ServerOptions) -> bool:
    """Whether other machines can reach the address."""
    if options.uds is not None or options.host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        return True


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """TLS as the options want it; None without a certificate. Raises ``ConfigError`` for files that do not fit."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    password = options.ssl_keyfile_password
    try:
        # An empty password is an error; asking for one would wait for a terminal.
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password if password is not None else "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {options.ssl_certfile}: no certificate with its private key could be read "
            f"({_reason(error)}); give both as PEM, the key in the same file or with --ssl-keyfile"
        ) from None
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs {options.ssl_ca_certs}: {_reason(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not a PEM file").lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)
