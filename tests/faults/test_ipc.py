"""Check 43: the engine listens to the process that started it, and no other can connect to it."""

from __future__ import annotations

import stat

from tests.helpers.rig import Server


def test_no_other_process_can_connect(fake: Server) -> None:
    """Its folder is ours alone, and its socket has no path once the server has connected."""
    (folder,) = fake.folder.rglob("fwk-tmp-engine-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(folder.rglob("*.sock"))
    assert fake.metric("fwk:engine_dropped_messages_total") == 0
    fake.check_invariants()
