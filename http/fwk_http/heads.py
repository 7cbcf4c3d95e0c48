"""What a request's head must and must not say, whatever it asks for."""

from __future__ import annotations

import ipaddress
import socket

_MACHINE = socket.gethostname().lower()
_LOCAL_NAMES = {"localhost", "host.docker.internal", "host.containers.internal", _MACHINE, f"{_MACHINE}.local"} - {""}
"""Containers of Docker and Podman know their host by the names in ``.internal``, which no public domain ends in."""

Headers = list[tuple[bytes, bytes]]
Refusal = tuple[int, str]
"""An HTTP status and a sentence."""


def head_refusal(version: str, method: str, headers: Headers, allowed_hosts: tuple[str, ...] | None) -> Refusal | None:
    """Why a request is refused by its head alone; None when it is not.

    ``allowed_hosts`` are names in lower case, ``*`` stands for any, ``*.example.org`` for what ends so; None allows
    the names of this machine only (see ``is_local_name``).
    """
    if method == "CONNECT":
        return 501, "this server is no proxy: CONNECT is not served"
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return 400, "a request has one Host header"
    for name, value in headers:
        words = value.lower().strip()
        if name == b"transfer-encoding" and words != b"chunked":
            return 501, "the only Transfer-Encoding served is chunked"
        if name == b"expect" and words != b"100-continue":
            return 417, "the only Expect served is 100-continue"
    if hosts and not is_allowed_host(hosts[0].decode("latin-1"), allowed_hosts):
        return 421, "this server does not answer to the name in the Host header; see --allowed-hosts"
    return None


def is_allowed_host(host: str, allowed: tuple[str, ...] | None) -> bool:
    """Whether a Host header (a name or an address, with or without a port) is one of those allowed."""
    name = _without_port(host.strip().lower())
    if allowed is None:
        return is_local_name(name)
    suffixes = tuple(pattern[1:] for pattern in allowed if pattern.startswith("*."))
    return "*" in allowed or name in allowed or bool(suffixes and name.endswith(suffixes))


def is_local_name(name: str) -> bool:
    """localhost, any IP address, or a name that this machine or its containers give it.

    A page that rebinds its own name to this machine still sends that name.
    """
    if name in _LOCAL_NAMES or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].removesuffix(".")
