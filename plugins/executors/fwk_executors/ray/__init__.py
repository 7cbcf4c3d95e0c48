"""The executor of a tensor-parallel group on a Ray cluster: an actor for each rank, in one placement group."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from fwk import ExecutorSpec, hookimpl
from fwk.config import Options, option
from fwk.interfaces.declaration import Facts, Needs


class RayOptions(Options):
    """Where Ray places the ranks of an engine (``--executor ray``)."""

    ray_address: str | None = option(
        None,
        "HOST:PORT of the Ray cluster's head, of which this machine is a node; local: start Ray on this machine alone; "
        "default: RAY_ADDRESS, the cluster that runs here, or else local.",
        stability="experimental",
        min_length=1,
        max_length=300,
    )
    ray_cpus_per_rank: int = option(
        1,
        "CPUs that Ray reserves for each rank, which computes with as many threads.",
        stability="experimental",
        ge=1,
        le=1024,
    )
    ray_gpus_per_rank: int | None = option(
        None,
        "GPUs that Ray reserves for each rank, 1 or 0; default: 1 where this machine has a GPU that --device allows.",
        stability="experimental",
        ge=0,
        le=1,
    )
    ray_resources_per_rank: dict[str, float] | None = option(
        None,
        'Further resources of Ray that each rank needs, as JSON: {"node_of_kind_a": 1}.',
        stability="experimental",
    )
    ray_placement_strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = option(
        "pack",
        "How Ray divides the ranks among nodes: on as few as possible, on as many, on one, or each on another.",
        stability="experimental",
    )
    ray_timeout: float = option(
        600.0,
        "Seconds in which Ray must have reserved what the ranks need, and in which ranks that have loaded must reach "
        "each other.",
        stability="experimental",
        gt=0,
        le=86400,
    )

    @field_validator("ray_address")
    @classmethod
    def _is_no_client(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("ray://"):
            raise ValueError(
                f"{value} is an address for Ray Client, whose programs are no part of the cluster: run fwk on one of "
                "its nodes and give HOST:PORT, or leave --ray-address out"
            )
        return value

    @field_validator("ray_resources_per_rank")
    @classmethod
    def _are_others(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name, amount in (value or {}).items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ValueError(f"{name} has an option of its own, or none: name resources of your cluster")
            if not 0 < amount < 2**31:
                raise ValueError(f"{amount:g} of {name} cannot be reserved: give a number above 0")
        return value


class RaySpec(ExecutorSpec):
    """Not chosen by itself: a cluster is the user's decision."""

    def auto_skip_reason(self, facts: Facts) -> str | None:
        return "puts workers on a Ray cluster: say --executor ray"

    def is_local(self, options: Any) -> bool:
        return False


@hookimpl
def executors() -> list[ExecutorSpec]:
    return [
        RaySpec(
            name="ray",
            load="fwk_executors.ray.executor:RayExecutor",
            max_tp_size=None,
            # who reaches a Ray may run code on its nodes: 2.60 asks for a token by default
            needs=Needs(packages=("ray>=2.60,<3",)),
            options=RayOptions,
            local_options=frozenset({"ray_address", "ray_timeout"}),
            summary="an actor for each tensor-parallel rank, on the nodes of a Ray cluster",
            touches=frozenset({"network", "processes"}),
        )
    ]
