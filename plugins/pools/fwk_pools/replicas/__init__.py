"""Several engines of one model: a request goes to the one that the load balancer chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fwk import EnginePoolSpec, Options, hookimpl, option


class ReplicasOptions(Options):
    """Several engines of one model."""

    data_parallel_size: int = option(
        1,
        "Engines behind the server's address, each with all of the model, its own KV cache and its own devices.",
        aliases=["dp-size", "dp"],
        ge=1,
        le=64,
    )
    load_balance_method: str = option("auto", "Which engine serves a request, if there are several.")
    replica_slow_start: float = option(
        10.0,
        "Seconds in which a replica that has been started again, or answers again, comes to its full share of "
        "requests, from a tenth of it; 0: at once.",
        stability="beta",
        ge=0,
        le=3600,
    )


@dataclass(frozen=True, kw_only=True)
class ReplicasSpec(EnginePoolSpec):
    """As many pools as ``--data-parallel-size`` says."""

    def num_pools(self, options: Any) -> int:
        return options.data_parallel_size


@hookimpl
def engine_pools() -> list[EnginePoolSpec]:
    return [
        ReplicasSpec(
            name="replicas",
            load="fwk_pools.replicas.pool:Replicas",
            options=ReplicasOptions,
            enabled_by=("data_parallel_size", "load_balance_method"),
            rank=10,
            summary="several engines that share nothing; one that dies takes only its own requests with it",
        )
    ]
