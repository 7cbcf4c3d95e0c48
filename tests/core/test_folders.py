"""Temporary folders, and those of dead processes."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from fwk_process import folders
from fwk_process.folders import PREFIX, TemporaryFolder


def test_folders_of_the_dead_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = TemporaryFolder("files")
    assert alive.path.stat().st_mode & 0o777 == 0o700
    dead, young, other = (tmp_path / name for name in (f"{PREFIX}files-a", f"{PREFIX}files-b", "someone-elses"))
    elsewhere = tmp_path / "elsewhere"
    for folder in (dead, young, other, elsewhere):
        folder.mkdir()
        (folder / "kept").write_bytes(b"x")
    link = tmp_path / f"{PREFIX}link"
    link.symlink_to(elsewhere)
    past = time.time() - 2 * folders.MIN_AGE
    for folder in (alive.path, dead, other, elsewhere):
        os.utime(folder, (past, past))
    new = TemporaryFolder("engine")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {path.name for path in (alive.path, young, other, elsewhere, link, new.path)}
    assert (elsewhere / "kept").exists()
    for folder in (alive, new):
        folder.close()
        assert not folder.path.exists()
