"""Experts spread over ranks: placed by their loads, held more than once, moved while the model serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.config import EngineOptions
from fwk.interfaces.declaration import Facts

TRIVIAL = "trivial"


class ExpertPlacementOptions(Options):
    """Options of ``features.expert_placement``."""

    expert_parallel_size: int = option(
        1,
        "Ranks over which the experts of a layer are spread, whole; where it is less than --tensor-parallel-size, "
        "groups of ranks share each expert. 1: every rank has a part of each. 0: as many as --tensor-parallel-size.",
        aliases=["ep-size", "ep"],
        turns={"enable-expert-parallel": 0, "enable-ep-moe": 0},
        stability="beta",
        ge=0,
        le=1024,
    )
    ep_num_redundant_experts: int = option(
        0,
        "Slots that a layer's experts have on the ranks of --expert-parallel-size beyond one for each: there, the "
        "experts that most tokens choose are held once more, in the memory of so many experts.",
        aliases=["redundant-expert"],
        stability="beta",
        ge=0,
        le=65536,
    )
    init_expert_location: str = option(
        TRIVIAL,
        "Which experts each rank holds at the start: trivial (in order, and the first ones again), or a JSON file with "
        "physical_to_logical_map or logical_count by layer, or an answer of POST /dump_expert_distribution_record.",
        stability="beta",
        min_length=1,
    )
    ep_dispatch_algorithm: Literal["static", "dynamic"] = option(
        "static",
        "Which of an expert's replicas computes a token: one that follows from all of the token's experts (static), "
        "so that its numbers do not depend on other tokens, or from its row in the step (dynamic), which is more even.",
        stability="beta",
    )
    enable_eplb: bool = option(
        False,
        "Count the tokens of each expert, and move experts between the ranks of --expert-parallel-size while serving, "
        "so that ranks compute equally many. Weights are read from the checkpoint anew.",
        aliases=["auto-update-redundancy-expert"],
        stability="beta",
    )
    eplb_algorithm: str = option(
        "auto", "How experts are spread over ranks by the tokens that chose them.", stability="beta"
    )
    eplb_rebalance_num_iterations: int = option(
        1000,
        "Steps that are counted before experts are moved.",
        needs="enable_eplb",
        aliases=["eplb-update-time"],
        stability="beta",
        ge=1,
        le=10_000_000,
    )
    eplb_rebalance_layers_per_chunk: int | None = option(
        None,
        "Layers whose experts are moved between two steps (default: all at once); few keep the pause short.",
        needs="enable_eplb",
        aliases=["eplb-balance-layer-per-step"],
        stability="beta",
        ge=1,
        le=65536,
    )
    eplb_min_rebalancing_utilization_threshold: float = option(
        1.0,
        "Move experts only where ranks were used at most so well: their mean number of tokens divided by the largest, "
        "over layers.",
        needs="enable_eplb",
        stability="beta",
        ge=0.0,
        le=1.0,
    )

    @property
    def is_placed(self) -> bool:
        """Whether experts are, or may come to be, elsewhere than in equal ranges."""
        return bool(self.ep_num_redundant_experts or self.init_expert_location != TRIVIAL or self.enable_eplb)


_PLACING = ("ep_num_redundant_experts", "init_expert_location", "ep_dispatch_algorithm", "enable_eplb")


class ExpertPlacementSpec(FeatureSpec):
    """A feature of runs that spread experts over ranks, by how many of them a layer's are divided."""

    def known(self, facts: Facts, options: ExpertPlacementOptions) -> Facts:
        return replace(facts, ep_size=options.expert_parallel_size or facts.tp_size)

    def conflict(self, options: Any, engine: EngineOptions) -> str | None:
        assert isinstance(options, ExpertPlacementOptions)
        ranks = engine.tensor_parallel_size
        size = options.expert_parallel_size or ranks
        if ranks % size:
            return (
                f"--expert-parallel-size {size} does not divide --tensor-parallel-size {ranks}, whose ranks compute "
                "the experts"
            )
        fields = ExpertPlacementOptions.model_fields
        placing = [name for name in _PLACING if getattr(options, name) != fields[name].default]
        if placing and size == 1:
            option = "--" + placing[0].replace("_", "-")
            return f"{option}: spreads experts over groups of ranks, and there is one: set --expert-parallel-size"
        if options.is_placed and engine.pipeline_parallel_size > 1:
            placed = next(name for name in ("enable_eplb", *placing) if name in placing)
            return (
                f"--{placed.replace('_', '-')}: experts are placed in all layers at once; leave "
                f"--pipeline-parallel-size {engine.pipeline_parallel_size} out, or that"
            )
        is_dynamic = options.ep_dispatch_algorithm == "dynamic"
        if is_dynamic and not options.ep_num_redundant_experts:
            return "--ep-dispatch-algorithm: chooses between replicas: add --ep-num-redundant-experts"
        if engine.enable_deterministic_inference and (options.enable_eplb or is_dynamic):
            changing = "--enable-eplb" if options.enable_eplb else "--ep-dispatch-algorithm dynamic"
            return (
                f"--enable-deterministic-inference: cannot be with {changing}, which changes the order in which a "
                "token's experts are added"
            )
        return None


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        ExpertPlacementSpec(
            name="expert_placement",
            worker="fwk_moe.expert_placement.part:PlacementPart",
            options=ExpertPlacementOptions,
            enabled_by=("expert_parallel_size", *_PLACING, "eplb_algorithm"),
            runners=("generate", "pool"),
            summary="Experts spread over ranks, placed by their loads, held more than once, moved while serving.",
        )
    ]
