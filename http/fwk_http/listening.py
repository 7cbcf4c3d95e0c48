"""Where and for whom the server listens, as its options say."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fwk_errors import ConfigError, PortTaken
from fwk_files.regular import check_regular
from fwk_http import addresses
from fwk_http.handover import Offer, Predecessor, take_listener
from fwk_http.keys import KeyOptions, Keys, read_keys
from fwk_http.server import Bounds

log = logging.getLogger(__name__)


class ListeningOptions(KeyOptions, Protocol):
    """``--host``, ``--port`` and what else says who may connect, and how long that may take."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def uds(self) -> str | None: ...
    @property
    def take_over(self) -> bool: ...
    @property
    def allowed_hosts(self) -> Sequence[str]: ...
    @property
    def allowed_origins(self) -> tuple[str, ...]: ...
    @property
    def read_timeout(self) -> float: ...
    @property
    def write_timeout(self) -> float: ...
    @property
    def ssl_certfile(self) -> str | None: ...
    @property
    def ssl_keyfile(self) -> str | None: ...
    @property
    def ssl_keyfile_password(self) -> str | None: ...
    @property
    def ssl_ca_certs(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that listens, and who may use what is behind it."""

    socket: socket.socket
    keys: Keys
    tls: ssl.SSLContext | None = None
    predecessor: Predecessor | None = None
    """The server that still serves there, until it is notified that this one does."""


def listen(options: ListeningOptions) -> Listening:
    """Take the address before anything slow is done.

    Raises ``PortTaken`` when it is not to be had, ``ConfigError`` for files that do not fit.
    """
    tls, keys = tls_context(options), read_keys(options)
    flag = "--uds" if options.uds is not None else "--port"
    if options.take_over and (taken := _take_over(options)) is not None:
        return Listening(taken[0], keys, tls, taken[1])
    try:
        path, port = options.uds, options.port
        listener = addresses.bind_path(path) if path is not None else addresses.bind(options.host, port)
    except addresses.AddressTaken as error:
        raise PortTaken(f"{error}; choose another {flag}") from None
    return Listening(listener, keys, tls)


def _take_over(options: ListeningOptions) -> tuple[socket.socket, Predecessor] | None:
    if options.uds is None and options.port == 0:
        raise ConfigError("--take-over needs --port: a free one is nobody's")
    try:
        wanted = options.uds if options.uds is not None else addresses.resolve(options.host, options.port)
        taken = take_listener(wanted)
    except (OSError, addresses.AddressTaken) as error:
        raise PortTaken(f"--take-over: {error}") from None
    if taken is None:
        log.info("no server to take over from: this one listens as usual")
    return taken


def offer(listening: Listening) -> Offer | None:
    """Offer the listener to the next server; None where the system has no such sockets, or the name is in use."""
    try:
        return Offer(listening.socket)
    except OSError as error:
        log.warning("no server can take over from this one (--take-over): %s", error.strerror or error)
        return None


def forget(options: ListeningOptions) -> None:
    """Remove the file of a unix socket, when the server that listened there ends."""
    if options.uds is not None:
        Path(options.uds).unlink(missing_ok=True)


def is_public(options: ListeningOptions) -> bool:
    """Whether other machines can reach the address."""
    return options.uds is None and not addresses.is_loopback(options.host)


LOCAL_PAGES = "http://localhost:*"
"""Stands among allowed origins for the pages that servers on this machine's loopback give out."""


def allowed_origins(options: ListeningOptions) -> tuple[str, ...]:
    """Origins of the web pages that may read replies: by default those that this machine serves to itself."""
    return options.allowed_origins or (() if is_public(options) else (LOCAL_PAGES,))


_LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"


def shared_with(origins: Sequence[str]) -> dict[str, Any]:
    """Settings of ``CORSMiddleware`` for pages of these origins."""
    return {
        "allow_origins": [origin for origin in origins if origin != LOCAL_PAGES],
        "allow_origin_regex": _LOCAL if LOCAL_PAGES in origins else None,
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],
        "expose_headers": ["x-request-id", "retry-after"],
    }


def warn_if_open(options: ListeningOptions, keys: Keys) -> None:
    """Say so if anybody on the network may use the model."""
    if is_public(options) and not keys.for_users:
        log.warning(
            "%s is reachable from other machines, and anybody there may use the model: add --api-key KEY, or listen on "
            "127.0.0.1",
            options.host,
        )


def tls_context(options: ListeningOptions) -> ssl.SSLContext | None:
    """TLS as the options want it; None without a certificate. Raises ``ConfigError`` for files that do not fit."""
    certificate, authorities = options.ssl_certfile, options.ssl_ca_certs
    if certificate is None:
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(options, name)
        try:
            if path is not None:
                check_regular(path)
        except OSError as error:
            raise ConfigError(f"--{name.replace('_', '-')} {path}: {error.strerror or error}") from None
    try:
        return addresses.tls_context(certificate, options.ssl_keyfile, options.ssl_keyfile_password, authorities)
    except addresses.BadCertificate as error:
        if error.is_authority:
            raise ConfigError(f"--ssl-ca-certs {authorities}: {error}") from None
        raise ConfigError(
            f"--ssl-certfile {certificate}: {error}; give both as PEM, the key in the same file or with --ssl-keyfile"
        ) from None


def bounds(options: ListeningOptions, error_body: Callable[[int, str], bytes]) -> Bounds:
    """What a connection may ask. error_body: of a reply, from its status and a message."""
    return Bounds(options.read_timeout, options.write_timeout, _allowed_hosts(options), error_body)


def _allowed_hosts(options: ListeningOptions) -> tuple[str, ...] | None:
    """Names the server answers to, ``*`` for any, None for this machine's only.

    By default a server that listens on loopback and asks for no key answers to no other name: a web page may point its
    own name at 127.0.0.1, and its scripts may then talk to the server as if it were theirs (DNS rebinding). Elsewhere
    proxies and networks give a server names that it does not know, and no web page reaches a unix socket.
    """
    if options.allowed_hosts:
        return tuple(name.lower() for name in options.allowed_hosts)
    is_guarded = options.uds is not None or options.api_key is not None or options.api_key_file is not None
    return None if not is_public(options) and not is_guarded else ("*",)
