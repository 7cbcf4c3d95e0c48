"""The crash_dump observer: what is written of requests when an engine dies."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fwk import SamplingParams
from fwk.errors import ConfigError
from fwk.interfaces.observer import ObserverContext, RequestRecord
from fwk_observability.crash_dump import CrashDumpOptions
from fwk_observability.crash_dump.observer import CrashDumpObserver


def observer_in(folder: Path, **options: Any) -> CrashDumpObserver:
    return CrashDumpObserver(ObserverContext("m", CrashDumpOptions(crash_dump_folder=str(folder), **options)))


def record_of(name: str, ago: float) -> RequestRecord:
    now = time.monotonic()
    return RequestRecord(name, "", 2, now - ago, prompt_token_ids=[1, 2], sampling=SamplingParams(temperature=0.5))


def ended(observer: CrashDumpObserver, name: str, ago: float) -> None:
    record = record_of(name, ago + 1)
    observer.request_arrived(record)
    record.finished, record.finish_reasons, record.outputs = time.monotonic() - ago, ("stop",), ("said",)
    observer.request_finished(record)


def test_requests_under_way_and_recent_ones_are_written(tmp_path: Path) -> None:
    observer = observer_in(tmp_path / "new", crash_dump_seconds=60)
    ended(observer, "old", 100)
    ended(observer, "recent", 5)
    observer.request_arrived(record_of("open", 3))
    observer.engine_died("killed by signal 9")
    [file] = (tmp_path / "new").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    died, open_one, recent = map(json.loads, file.read_text().splitlines())
    assert (died["event"], died["reason"]) == ("engine_died", "killed by signal 9")
    assert (open_one["event"], open_one["request_id"], open_one["finished"]) == ("under_way", "open", None)
    assert open_one["prompt_token_ids"] == [1, 2]
    assert open_one["sampling"]["temperature"] == 0.5
    assert (recent["event"], recent["request_id"], recent["outputs"]) == ("ended", "recent", ["said"])
    assert 5 <= recent["finished"] < 15


def test_each_death_has_a_file(tmp_path: Path) -> None:
    observer = observer_in(tmp_path)
    observer.engine_died("one")
    observer.engine_died("two")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--crash-dump-folder"):
        observer_in(tmp_path / "file")
