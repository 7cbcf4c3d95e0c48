"""The identity of a model's files is their bytes: read once for each content, wherever they lie."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fwk.engine.node import common
from fwk.errors import ModelLoadError
from fwk.plugins import build_config, discover
from fwk.setup.checkpoint import open_model
from fwk.setup.resolve import resolve
from fwk_files import model_hash
from fwk_files.model_hash import ModelHash


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_hash, "RECENT_NS", 0)
    return tmp_path / "cache" / "fwk" / "hashes"


def written(folder: Path, weights: bytes, time: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in (("config.json", b"{}"), ("model.safetensors", weights)):
        (folder / name).write_bytes(content)
        os.utime(folder / name, ns=(time, time))
    return folder


def test_bytes_count_and_nothing_else(tmp_path: Path) -> None:
    size = 3 * 2**20
    weights = bytes(size)
    found = ModelHash(written(tmp_path / "a", weights)).result()
    other = bytearray(weights)
    other[size // 2 + 8192] = 1  # between the places that samples were of
    changed = written(tmp_path / "b", bytes(other))
    assert (changed / "model.safetensors").stat().st_mtime_ns == 1
    assert ModelHash(changed).result() != found
    assert ModelHash(written(tmp_path / "c", weights, 2)).result() == found
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / ".hidden").write_text("x")
    assert ModelHash(tmp_path / "elsewhere").result() == found
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert ModelHash(tmp_path / "link").result() == found
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"same")
    assert ModelHash(tmp_path / "one.gguf").result() == ModelHash(tmp_path / "two.gguf").result()
    (tmp_path / "a" / "model.safetensors").rename(tmp_path / "a" / "model2.safetensors")
    assert ModelHash(tmp_path / "a").result() != found


def test_machines_agree_on_every_byte(tmp_path: Path, tiny_folder: Path) -> None:
    """Of one run's nodes, each of which computes a part of the layers."""
    plugins, told = discover(), []
    for name, change in (("a", 0), ("b", 1)):
        folder = Path(shutil.copytree(tiny_folder, tmp_path / name))
        more = bytearray(2**20 + 17)
        more[2**19] = change
        (folder / "more.bin").write_bytes(more)
        os.utime(folder / "more.bin", ns=(1, 1))
        config = build_config(plugins, {"model": str(folder), "load_format": "dummy"})
        told.append(common(config, plugins, resolve(config, open_model(config, plugins, print), plugins)))
    assert [name for name in told[0] if told[0][name] != told[1][name]] == ["--model (what its files hold)"]


def test_other_bytes_in_place_with_the_time_put_back_are_read_again(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", b"12345678")
    before = ModelHash(folder).result()
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"87654321")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert ModelHash(folder).result() != before


def test_each_content_is_read_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "a", b"12345678")
    read: list[str] = []
    digest = model_hash.hashlib.file_digest

    def counted(source: object, make: object) -> object:
        read.append(Path(source.name).name)  # type: ignore[attr-defined]
        return digest(source, make)  # type: ignore[arg-type]

    monkeypatch.setattr(model_hash.hashlib, "file_digest", counted)
    found = ModelHash(folder).result()
    assert read == ["config.json", "model.safetensors"]
    assert ModelHash(folder).result() == found
    assert len(read) == 2
    for kept in own_cache.iterdir():
        kept.write_text('{"damaged')
    assert ModelHash(folder).result() == found
    assert len(read) == 4
    monkeypatch.setattr(model_hash, "RECENT_NS", 10**12)
    fresh = written(tmp_path / "b", b"x")
    for _ in range(2):
        ModelHash(fresh).result()
    assert len(read) == 8, "a file that has just changed may change once more within one time"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert ModelHash(folder).result() == found


def test_files_that_change_under_it_end_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(tmp_path / "a", b"12345678")
    waiting = ModelHash(folder)
    (folder / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(ModelLoadError, match=r"model.safetensors changed while it was read: start again"):
        waiting.result()
