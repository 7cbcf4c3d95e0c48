"""Which experts the tokens of a mixture of experts take, by layer.

Off until one of its options is given: then a step's layers are called one by one, and none is captured. The
administrator begins, reads and ends a record with ``POST /start_expert_distribution_record``,
``/dump_expert_distribution_record`` and ``/stop_expert_distribution_record``, as in SGLang.
"""

from typing import Any, Literal

from fwk import ObserverSpec, Options, hookimpl, option
from fwk.config import EngineOptions


class ExpertDistributionOptions(Options):
    """Options of ``observers.expert_distribution``."""

    expert_distribution_recorder_mode: Literal["stat", "per_pass", "per_token"] | None = option(
        None,
        "What a record of the experts that tokens take holds: tokens of each expert over all steps (stat) or in each "
        "step (per_pass), or the experts of each token (per_token). Steps are not captured then.",
    )
    expert_distribution_recorder_buffer_size: int = option(
        1000,
        "Steps that a record of experts holds: the latest ones. -1: all since it was begun.",
        needs="expert_distribution_recorder_mode",
        ge=-1,
        le=10_000_000,
    )
    expert_distribution_recorder_folder: str | None = option(
        None,
        "Folder of the safetensors files that records by step or token are written to.",
        needs="expert_distribution_recorder_mode",
        min_length=1,
    )
    enable_expert_distribution_metrics: bool = option(
        False,
        "Log how evenly tokens spread over experts, every ten seconds in which there were any: the mean load of an "
        "expert divided by the largest, over layers. Steps are not captured then.",
    )
    expert_distribution_window_size: int = option(
        1000,
        "Steps whose tokens a line of --enable-expert-distribution-metrics counts together: the latest ones.",
        needs="enable_expert_distribution_metrics",
        ge=1,
        le=1_000_000,
    )


class ExpertDistributionSpec(ObserverSpec):
    """Records in one worker, which must have all layers."""

    def conflict(self, options: Any, engine: EngineOptions) -> str | None:
        stages, given = engine.pipeline_parallel_size, [name for name in self.enabled_by if getattr(options, name)]
        if stages == 1 or not given:
            return None
        flag = f"--{given[0].replace('_', '-')}"
        return f"{flag}: one worker counts, and --pipeline-parallel-size {stages} divides the layers"


@hookimpl
def observers() -> list[ObserverSpec]:
    return [
        ExpertDistributionSpec(
            name="expert_distribution",
            load="fwk_observability.expert_distribution.observer:ExpertDistributionObserver",
            worker="fwk_observability.expert_distribution.worker:WorkerExperts",
            options=ExpertDistributionOptions,
            enabled_by=("expert_distribution_recorder_mode", "enable_expert_distribution_metrics"),
            reads_layers=True,
            summary="which experts tokens take, recorded on request and told in the log",
        )
    ]
