from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.client import HealthProbe
from tests.helpers.rig import Server
from tests.helpers.servers import fake, python_path, shared_fake, shared_tiny, spawn, tiny, tiny_model

__all__ = ["fake", "python_path", "shared_fake", "shared_tiny", "spawn", "tiny", "tiny_model"]


@pytest.fixture
def as_before(server: Server) -> Iterator[None]:
    """Others are served meanwhile, and nothing of it all is left. ``server``: the module's own."""
    with HealthProbe(server) as probe:
        yield
    assert probe.statuses <= {200}
    server.check_invariants()
