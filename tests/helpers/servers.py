"""Fixtures with servers: started once, used by many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.rig import FAKE, FAKE_CHUNK, Server, install_plugins, write_model

Start = Callable[..., Server]
Begin = Callable[..., Server]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH with the tests' plugins on it."""
    return install_plugins(tmp_path_factory.mktemp("site"))


@contextmanager
def starting(model: Path, python_path: str) -> Iterator[Start]:
    """Start servers with the given flags; they end with the context."""
    servers: list[Server] = []

    def start(
        *flags: str, key: str | None = None, environment: dict[str, str] | None = None, forked: bool = True
    ) -> Server:
        if key is not None:
            flags = (*flags, "--api-key", key)
        servers.append(Server(model, *flags, python_path=python_path, environment=environment, forked=forked))
        return servers[-1].start(key)

    try:
        yield start
    finally:
        for server in servers:
            server.close()


@pytest.fixture(scope="module")
def spawn(tiny_model: Path, python_path: str) -> Iterator[Start]:
    """Start servers with the given flags; they end with the module."""
    with starting(tiny_model, python_path) as start:
        yield start


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start servers of any model with the given flags; they end with the test, if they started or not."""
    servers: list[Server] = []

    def start(model: Path, *flags: str) -> Server:
        servers.append(Server(model, *flags))
        return servers[-1].start()

    yield start
    for server in servers:
        server.close()


class Shared:
    """A server that modules use one after another; a module that ended it leaves another to the next."""

    def __init__(self, start: Start, flags: tuple[str, ...]) -> None:
        self._start, self._flags = start, flags
        self._server: Server | None = None

    def server(self) -> Server:
        if self._server is None or not self._server.is_running or self._server.health() != 200:
            self._server = self._start(*self._flags)
        else:
            self._server.settle()  # what others left in it is no growth
        return self._server


@pytest.fixture(scope="session")
def shared_tiny(tiny_model: Path, python_path: str) -> Iterator[Shared]:
    with starting(tiny_model, python_path) as start:
        yield Shared(start, ("--max-body-bytes", str(64 * 2**20)))


@pytest.fixture(scope="session")
def shared_fake(tiny_model: Path, python_path: str) -> Iterator[Shared]:
    with starting(tiny_model, python_path) as start:
        yield Shared(start, (*FAKE, "--chunked-prefill-size", str(FAKE_CHUNK), "--fake-step-ms", "2"))


@pytest.fixture(scope="module")
def tiny(shared_tiny: Shared) -> Server:
    """The tiny model, served."""
    return shared_tiny.server()


@pytest.fixture(scope="module")
def fake(shared_fake: Shared) -> Server:
    """The engine without a model: 8 sequences at once, prompts in chunks of 64, a step every 2 ms."""
    return shared_fake.server()
