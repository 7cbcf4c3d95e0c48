"""Engines in actors of a Ray cluster, as many as their queues need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import field_validator, model_validator

from fwk import EnginePoolSpec, Options, hookimpl, option
from fwk.interfaces.declaration import Needs


class RayEnginesOptions(Options):
    """Where engines run, and how many (``--data-parallel-backend ray``)."""

    data_parallel_backend: Literal["ray"] | None = option(
        None,
        "ray: each engine of --data-parallel-size runs in an actor of a Ray cluster, of which this machine is a node "
        "(default: in a process of this machine).",
        stability="experimental",
    )
    ray_engine_address: str = option(
        "auto",
        "HOST:PORT of that cluster's head; auto: RAY_ADDRESS, or the cluster that runs on this machine.",
        stability="experimental",
        min_length=1,
        max_length=300,
    )
    ray_engine_cpus: int = option(
        1, "CPUs that Ray reserves for each engine, which computes with as many threads.", stability="experimental",
        ge=1, le=1024,
    )  # fmt: skip
    ray_engine_gpus: int = option(0, "GPUs that Ray reserves for each engine.", stability="experimental", ge=0, le=64)
    ray_engine_resources: dict[str, float] | None = option(
        None,
        'Further resources of Ray that each engine needs, as JSON: {"node_of_kind_a": 1}.',
        stability="experimental",
    )
    ray_engine_timeout: float = option(
        600.0,
        "Seconds in which Ray must have a place for an engine.",
        stability="experimental",
        gt=0,
        le=86400,
    )
    ray_min_engines: int | None = option(
        None,
        "Engines that always run; the others of --data-parallel-size are started while requests queue, and stopped "
        "when they no longer do (default: all run).",
        stability="experimental",
        ge=1,
        le=64,
    )
    ray_target_requests: int = option(
        16,
        "Sequences that an engine is to have open: with more in each on average, another engine is started.",
        stability="experimental",
        ge=1,
        le=65536,
    )
    ray_upscale_delay: float = option(
        5.0, "Seconds in which there must be more before one is started.", stability="experimental", ge=0, le=3600
    )
    ray_downscale_delay: float = option(
        300.0,
        "Seconds in which one engine fewer must have sufficed before one is stopped, once its requests have ended.",
        stability="experimental",
        ge=0,
        le=86400,
    )

    @field_validator("ray_engine_address")
    @classmethod
    def _is_no_client(cls, value: str) -> str:
        if value.startswith("ray://"):
            raise ValueError(
                f"{value} is an address for Ray Client, whose programs are no part of the cluster: run fwk on one of "
                "its nodes and give HOST:PORT, or leave --ray-engine-address out"
            )
        return value

    @field_validator("ray_engine_resources")
    @classmethod
    def _are_others(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name, amount in (value or {}).items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ValueError(f"{name} has an option of its own, or none: name resources of your cluster")
            if not 0 < amount < 2**31:
                raise ValueError(f"{amount:g} of {name} cannot be reserved: give a number above 0")
        return value

    @model_validator(mode="after")
    def _is_on(self) -> RayEnginesOptions:
        if self.data_parallel_backend is None and self.ray_min_engines is not None:
            raise ValueError("--ray-min-engines needs --data-parallel-backend ray")
        return self


@dataclass(frozen=True, kw_only=True)
class RayEnginesSpec(EnginePoolSpec):
    """Its engines are actors, each of which a process here speaks for."""

    def process(self, options: Any) -> str:
        return "fwk_pools.ray.relay" if options.data_parallel_backend == "ray" else ""


def app(args: dict[str, str]) -> Any:
    """An application of Ray Serve: ``serve run fwk_pools.ray:app model=MODEL max_replicas=4`` (``ray[serve]``)."""
    from fwk_pools.ray.serve_app import AppOptions, application  # noqa: PLC0415 - Ray Serve alone needs it

    return application(AppOptions.model_validate(args))


@hookimpl
def engine_pools() -> list[EnginePoolSpec]:
    return [
        RayEnginesSpec(
            name="ray",
            load="fwk_pools.ray.pool:RayEngine",
            options=RayEnginesOptions,
            enabled_by=("data_parallel_backend",),
            needs=Needs(packages=("ray>=2.60,<3",)),
            rank=-10,  # below the replicas: each of them is one
            summary="engines as actors of a Ray cluster, started again on other nodes, as many as requests need",
            touches=frozenset({"network", "processes"}),
        )
    ]
