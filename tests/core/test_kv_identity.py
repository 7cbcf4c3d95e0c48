"""What tells one model's weights from another's: their content, also where name, size and time are the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fwk.interfaces.loader import LoaderContext
from fwk.interfaces.served_weights import ServedWeights
from fwk.plugins import build_config, discover
from fwk.worker.kv.identity import _options
from fwk_files.fingerprint import SAMPLE_EVERY, fingerprint, known_files
from fwk_loaders.safetensors.loader import SafetensorsLoader


def test_content_counts_where_name_size_and_time_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    size = 3 * SAMPLE_EVERY + 17
    seen = []
    for content in (bytes(size), bytes(size), bytes([1]) * size, bytes(size - 1) + b"1", b"1" + bytes(size - 1)):
        file.write_bytes(content)
        os.utime(file, ns=(1, 1))
        seen.append(str(known_files(tmp_path)))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4


def test_a_small_change_shows_in_the_time(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(SAMPLE_EVERY))
    before = known_files(tmp_path)
    with file.open("r+b") as target:
        target.seek(SAMPLE_EVERY // 2)
        target.write(b"1")
    os.utime(file, ns=(2, 2))
    assert known_files(tmp_path) != before


def test_where_a_folder_lies_does_not_matter(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place / "model").mkdir(parents=True)
        (tmp_path / place / "model" / "x.gguf").write_bytes(b"x")
        os.utime(tmp_path / place / "model" / "x.gguf", ns=(1, 1))
    assert known_files(tmp_path / "a" / "model") == known_files(tmp_path / "b" / "model")


def test_weights_that_are_no_files_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    names = {fingerprint(tmp_path), fingerprint(tmp_path, "a"), fingerprint(tmp_path, "b")}
    assert len(names) == 3


def test_served_files_are_known_again(tmp_path: Path) -> None:
    """Whatever is done to a file shows: other bytes in place, another file of the same bytes, none."""
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"12345678")
    checkpoint = SafetensorsLoader(LoaderContext()).open(tmp_path)

    def noted() -> ServedWeights:
        return ServedWeights.of("safetensors", checkpoint)

    def in_place() -> None:
        times = path.stat().st_mtime_ns
        with path.open("r+b") as file:
            file.write(b"87654321")
        os.utime(path, ns=(times, times))

    def replaced() -> None:
        shutil.copy2(path, tmp_path / "new")
        os.replace(tmp_path / "new", path)

    assert noted().changed() is None
    for change in (in_place, replaced, path.touch, lambda: os.truncate(path, 4), path.unlink):
        weights = noted()
        assert weights.changed() is None
        change()
        assert weights.changed() == path, change


def test_options_of_features_count_unless_they_cannot_change_kv() -> None:
    given = {
        "disable_jump_forward": True,
        "init_expert_location": "trivial",
        "sla_default": 3,
        "schedule_policy": "sla",
    }
    plugins = discover()
    config = build_config(plugins, given)
    assert set(config.plugin_options) == {"features.jump_forward", "features.expert_placement", "schedulers.sla"}
    assert [key for key, _ in _options(config, plugins, frozenset({"schedulers"}))] == ["features.expert_placement"]
