"""Connections that have not proven themselves keep no other out."""

from __future__ import annotations

import contextlib
import socket

from fwk_http.strangers import Strangers


def is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True


def test_the_oldest_unproven_is_ended_and_no_proven_one() -> None:
    with contextlib.ExitStack() as held:
        pairs = [tuple(held.enter_context(end) for end in socket.socketpair()) for _ in range(6)]
        strangers = Strangers(2)
        for number, (ours, _) in enumerate(pairs):
            strangers.enter(ours)
            if number == 0:
                with strangers.proving(ours):
                    pass
        assert [is_open(theirs) for _, theirs in pairs] == [True, False, False, False, True, True]
