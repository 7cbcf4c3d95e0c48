"""Several engines as one, with what stands for their clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fwk.config import Config
from fwk.interfaces.balance import LoadBalancer
from fwk.interfaces.engine_pool import EnginePoolContext
from fwk.server import one_engine
from fwk.server.engine_forks import EngineForks
from fwk.server.model_engines import ModelEngines
from fwk_pools.replicas import ReplicasOptions
from fwk_pools.replicas.pool import Replicas


def replicas_of(
    monkeypatch: pytest.MonkeyPatch, client: Callable[..., Any], balancer: LoadBalancer, count: int = 3
) -> tuple[ModelEngines, Replicas, list[Any]]:
    """The engines of a model, their pool, and the clients, each of which ``client`` has made."""
    clients: list[Any] = []

    def new_client(*arguments: Any) -> Any:
        clients.append(client(*arguments))
        return clients[-1]

    monkeypatch.setattr(one_engine, "EngineClient", new_client)
    config, pools = Config(), list[Replicas]()

    def make(begins: Any) -> Replicas:
        context = EnginePoolContext(
            below=lambda i: one_engine.OneEngine(config, "f", begins, i, count, EngineForks().take),
            choose=lambda *_, **__: balancer,
            options=ReplicasOptions(data_parallel_size=count),
        )
        pools.append(Replicas(context))
        return pools[0]

    return ModelEngines(config, make), pools[0], clients
