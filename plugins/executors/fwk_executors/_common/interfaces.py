"""Network interfaces of this machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def is_loopback(address: str) -> bool:
    """Whether no other machine reaches an address; that of this machine's own name often is one (/etc/hosts)."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def find_interface(address: str) -> str | None:
    """The network interface that has an address; None if none of this machine's has."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if ipaddress.ip_address(one.address.partition("%")[0]) == wanted:
                return name
    if wanted.is_loopback and address != "127.0.0.1":  # 127.0.0.2 and its like are the same interface's
        return find_interface("127.0.0.1")
    return None
