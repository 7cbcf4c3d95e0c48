"""How many states of recurrent layers (Mamba, linear attention) are kept, how often, and in which precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.errors import ConfigError
from fwk.interfaces.feature import FeatureRun, StatesKept


class RecurrentStatesOptions(Options):
    """Options of ``features.recurrent_states``."""

    max_mamba_cache_size: int | None = option(
        None,
        "States of recurrent layers in memory: one for each running request, the rest for prefixes to continue from "
        "(default: as many of both, where half and a tenth of the free memory hold them; on a CPU pages are taken when "
        "they are used).",
        stability="beta",
        ge=1,
        le=2**20,
    )
    mamba_track_interval: int = option(
        StatesKept().interval,
        "Generated tokens after which the state of recurrent layers is kept for the prefix cache again.",
        stability="beta",
        ge=1,
        le=2**24,
    )
    mamba_ssm_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision of the states of recurrent layers; auto: float32.", stability="beta"
    )


@dataclass(frozen=True, kw_only=True)
class RecurrentStatesSpec(FeatureSpec):
    """Its options are for models with recurrent layers."""

    def states_kept(self, options: RecurrentStatesOptions) -> StatesKept:
        return StatesKept(options.max_mamba_cache_size, options.mamba_track_interval)

    def check_run(self, run: FeatureRun, options: RecurrentStatesOptions) -> None:
        idle = RecurrentStatesOptions()
        for name in () if run.is_recurrent else RecurrentStatesOptions.model_fields:
            if getattr(options, name) != getattr(idle, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}: {run.model} has no recurrent layers: leave it out")
        most, least = options.max_mamba_cache_size, run.config.engine.max_running_requests
        if most is not None and most < least:
            raise ConfigError(
                f"--max-mamba-cache-size {most}: each of --max-running-requests {least} needs a state; raise the "
                "one or lower the other"
            )


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        RecurrentStatesSpec(
            name="recurrent_states",
            worker="fwk_features.recurrent_states.worker:StatePrecision",
            options=RecurrentStatesOptions,
            runners=("generate", "pool"),
            summary="how many states of recurrent layers are kept, how often, and in which precision",
        )
    ]
