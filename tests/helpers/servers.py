"""Fixtures with servers: started once, used by many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.rig import FAKE, FAKE_CHUNK, Server, install_plugins, write_model

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH with the tests' plugins on it."""
    return install_plugins(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def spawn(tiny_model: Path, python_path: str) -> Iterator[Start]:
    """Start servers with the given flags; they end with the module."""
    servers: list[Server] = []

    def start(*flags: str, key: str | None = None, environment: dict[str, str] | None = None) -> Server:
        if key is not None:
            flags = (*flags, "--api-key", key)
        servers.append(Server(tiny_model, *flags, python_path=python_path, environment=environment))
        return servers[-1].start(key)

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def tiny(spawn: Start) -> Server:
    """The tiny model, served."""
    return spawn("--max-body-bytes", str(64 * 2**20))


@pytest.fixture(scope="module")
def fake(spawn: Start) -> Server:
    """The engine without a model: 8 sequences at once, prompts in chunks of 64, a step every 2 ms."""
    return spawn(*FAKE, "--chunked-prefill-size", str(FAKE_CHUNK), "--fake-step-ms", "2")
