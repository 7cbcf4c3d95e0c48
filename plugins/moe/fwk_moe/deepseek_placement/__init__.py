"""Spread experts over ranks by the greedy algorithm that DeepSeek published."""

from fwk import ExpertPlacerSpec, hookimpl


@hookimpl
def expert_placers() -> list[ExpertPlacerSpec]:
    return [
        ExpertPlacerSpec(
            name="deepseek",
            load="fwk_moe.deepseek_placement.placer:DeepSeekPlacer",
            summary="The busiest experts replicated, then the heaviest first to the rank with the least to do; groups "
            "of experts stay in one node where they divide by nodes.",
        )
    ]
