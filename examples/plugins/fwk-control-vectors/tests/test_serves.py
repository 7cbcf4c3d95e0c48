"""Vectors are loaded into a running server, change what is said, and never anybody else's K/V."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fwk.testing import ask, serve_tiny

KEY = "of-the-administrator"
PROMPT = {"prompt": "Once upon a time there was", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    save_file({"direction.0": np.linspace(-1, 1, 64, dtype=np.float32)}, folder / "north.safetensors")
    save_file({"direction.7": np.zeros(64, np.float32)}, folder / "deep.safetensors")
    save_file({"direction.0": np.zeros(63, np.float32)}, folder / "short.safetensors")
    save_file({"weight": np.zeros(64, np.float32)}, folder / "other.safetensors")
    (folder / "no.safetensors").write_text("no")
    return folder


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_tiny("--enable-control-vectors", "--admin-api-key", KEY) as address:
        yield address


def load(url: str, name: str, path: Path) -> Any:
    return ask(url, "/control_vectors", {"name": name, "path": str(path)}, KEY)


def said(url: str, **fields: Any) -> str:
    return ask(url, "/v1/completions", {**PROMPT, **fields})["choices"][0]["text"]


def refusal(error: urllib.error.HTTPError) -> str:
    return json.loads(error.read())["error"]["message"]


def test_a_vector_is_loaded_used_and_deleted(url: str, files: Path) -> None:
    plain = said(url)
    assert load(url, "north", files / "north.safetensors") == {"name": "north", "layers": [0]}
    steered = said(url, control_vector="north", control_strength=8)
    assert steered != plain
    assert said(url) == plain, "it found another's K/V"
    assert said(url, control_vector="north", control_strength=8) == steered
    assert said(url, control_vector="north", control_strength=0) == plain
    delete = urllib.request.Request(url + "/control_vectors/north", method="DELETE")
    delete.add_header("authorization", f"Bearer {KEY}")
    urllib.request.urlopen(delete, timeout=30).close()
    with pytest.raises(urllib.error.HTTPError) as gone:
        said(url, control_vector="north")
    assert (gone.value.code, refusal(gone.value)) == (400, "no control vector 'north' is loaded")


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("deep", "direction.7: this model takes directions for layers 0 to 0"),
        ("short", "direction.0 has 63 numbers, this model's layers 64"),
        ("other", "path has 'weight'"),
        ("no", "path is no safetensors file"),
        ("missing", "path cannot be read: No such file"),
    ],
)
def test_wrong_files_are_named(url: str, files: Path, file: str, why: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as wrong:
        load(url, "wrong", files / f"{file}.safetensors")
    assert wrong.value.code == 400
    assert refusal(wrong.value).startswith(why)


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_are_named(url: str, stream: bool) -> None:
    with pytest.raises(urllib.error.HTTPError) as wrong:
        said(url, control_vector="nobody", stream=stream)
    assert (wrong.value.code, refusal(wrong.value)) == (400, "no control vector 'nobody' is loaded")


def test_nobody_else_loads_vectors(url: str, files: Path) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(url, "/control_vectors", {"name": "mine", "path": str(files / "north.safetensors")})
    assert refused.value.code == 401
