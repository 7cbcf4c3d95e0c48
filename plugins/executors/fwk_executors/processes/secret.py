"""The secret that the nodes of a run share, and the address where they meet."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import psutil

from fwk.errors import ConfigError

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


def read_secret(path: str) -> bytes:
    """What is in ``--dist-token-file``, without white space around it. Raises ``ConfigError``."""
    try:
        with Path(path).expanduser().open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"--dist-token-file: cannot read {path}: {error.strerror or error}") from None
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"--dist-token-file {path}: must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, not {len(secret)} "
            "(openssl rand -hex 32 makes a good secret)"
        )
    return secret


def is_loopback(address: str) -> bool:
    """Whether no other machine reaches an address; that of this machine's own name often is one (/etc/hosts)."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """The network interface that has an address. Raises ``ConfigError`` if none of this machine's has."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if ipaddress.ip_address(one.address.partition("%")[0]) == wanted:
                return name
    if wanted.is_loopback:  # 127.0.0.2 and its like are the same interface's
        return interface_of("127.0.0.1")
    raise ConfigError(f"no network interface of this machine has the address {address} (--dist-init-addr)")
