"""Ports of this machine for servers of tests."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One at which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
