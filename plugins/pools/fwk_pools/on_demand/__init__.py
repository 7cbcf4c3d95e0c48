"""Engines that run while they are used: several models at one address, and models that give their memory back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fwk import EnginePoolSpec, Options, hookimpl, option
from fwk.config import Config


class OnDemandOptions(Options):
    """Several models at one address, and engines that end while they are not used."""

    also: tuple[str, ...] = option(
        (),
        "More models at the same address, each as NAME=MODEL; requests choose by their 'model'. They load when first "
        "asked for. A --config file may have a list of them, with options of their own, under 'models'.",
        stability="beta",
    )
    idle_timeout: float | None = option(
        None,
        "Seconds without a request after which a model's engines end and give their memory back; the next request "
        "starts them again (default: never).",
        stability="beta",
        gt=0,
        le=2592000,
    )
    enable_memory_saver: bool = option(
        False,
        "POST /release_memory_occupation ends the engines of a model, and with them all memory that they hold, until "
        "POST /resume_memory_occupation, for the administrator (--admin-api-key); vLLM's /sleep and /wake_up, too.",
        aliases=["enable-sleep-mode"],
        stability="beta",
    )
    models_memory_limit: float | None = option(
        None,
        "GiB that the engine processes of all models of --also may take together; to load one more, those used least "
        "recently end first (default: no limit).",
        stability="beta",
        gt=0,
        le=2**20,
    )


@dataclass(frozen=True, kw_only=True)
class OnDemandSpec(EnginePoolSpec):
    """Also makes the configurations of several models."""

    def configs(
        self, given: Mapping[str, Any], build: Callable[[Mapping[str, Any]], Config], names: Mapping[str, str]
    ) -> list[Config]:
        from fwk_pools.on_demand.several import model_configs  # noqa: PLC0415 - fwk serve alone reads them

        return model_configs(given, build, names)


@hookimpl
def engine_pools() -> list[EnginePoolSpec]:
    return [
        OnDemandSpec(
            name="on_demand",
            load="fwk_pools.on_demand.pool:OnDemand",
            router="fwk_pools.on_demand.model_router:ModelRouter",
            options=OnDemandOptions,
            enabled_by=("also", "idle_timeout", "enable_memory_saver"),
            rank=20,
            summary="engines that end when unused and start when asked for; several models that share memory",
        )
    ]
