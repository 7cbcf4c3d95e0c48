"""The secret that the nodes of a run share, and the address where they meet."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from fwk.config import secrets
from fwk.errors import ConfigError


def read_secret(path: str) -> bytes:
    """What is in ``--dist-token-file``. Raises ``ConfigError``."""
    return secrets.read_secret(path, "--dist-token-file")


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
