"""The secret that the nodes of a run share, and the address where they meet."""

from __future__ import annotations

from fwk.config import secrets
from fwk.errors import ConfigError
from fwk_executors._common.interfaces import find_interface, is_loopback

__all__ = ["interface_of", "is_loopback", "read_secret"]


def read_secret(path: str) -> bytes:
    """What is in ``--dist-token-file``. Raises ``ConfigError``."""
    return secrets.read_secret(path, "--dist-token-file")


def interface_of(address: str) -> str:
    """The network interface that has an address. Raises ``ConfigError`` if none of this machine's has."""
    found = find_interface(address)
    if found is None:
        raise ConfigError(f"no network interface of this machine has the address {address} (--dist-init-addr)")
    return found
