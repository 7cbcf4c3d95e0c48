"""The part in each worker: says which experts the ranks of the served model hold, and moves them between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from fwk.errors import ConfigError
from fwk.interfaces.expert_placement import ExpertPlacer, ExpertPlacerContext
from fwk.interfaces.feature import LoadedModel, ModelBuild, WorkerPart, WorkerPartContext
from fwk.interfaces.model import ModelContext
from fwk.interfaces.parallel import ParallelGroup
from fwk_moe.expert_placement import ExpertPlacementOptions
from fwk_moe.expert_placement.location import read_location
from fwk_moe.expert_placement.placement import ModelPlacement, goes_by_counts
from fwk_moe.expert_placement.rebalancer import Rebalancer


class PlacementPart(WorkerPart):
    """Models and heads that draft have equal ranges of experts, as without it."""

    def __init__(self, context: WorkerPartContext) -> None:
        """Raises ``ConfigError`` for a file of locations that says nothing about experts."""
        super().__init__(context)
        self._options: ExpertPlacementOptions = context.options
        self._location = read_location(self._options.init_expert_location)
        self._goes_by_counts = goes_by_counts(self._options, self._location)
        self._group: ParallelGroup | None = None
        self._placement: ModelPlacement | None = None  # of the model that serves
        self._rebalancer: Rebalancer | None = None

    @cached_property
    def _placer(self) -> ExpertPlacer:
        assert self.context.plugins is not None
        return self.context.plugins.choose("expert_placers", self._options.eplb_algorithm, ExpertPlacerContext)

    def model_context(self, context: ModelContext, build: ModelBuild) -> str:
        options = self._options
        ranks = f"{context.ep_size} of {context.tp.size}"
        if build.role != "served" or not options.is_placed:
            return ranks
        if options.enable_eplb and not build.can_reread:
            raise ConfigError(
                f"--enable-eplb reads experts again when they move, and --load-format {build.loader} reads them "
                "from where they may be gone by then: load the model from files, or leave --enable-eplb out"
            )
        self._group = context.tp
        context.expert_placement = context.made[self.context.name] = ModelPlacement(
            options,
            self._location,
            self._placer if self._goes_by_counts else None,
            context.config.num_layers,
            context.ep_size,
            num_nodes=context.tp.size // context.tp.local_size,
        )
        return f"{ranks} {options.ep_num_redundant_experts} {options.init_expert_location} {options.eplb_algorithm}"

    def model_loaded(self, loaded: LoadedModel) -> None:
        self._placement = loaded.made.get(self.context.name)

    def warmed_up(self) -> None:
        if self._placement is None or not self._placement.counts:
            return
        if self._rebalancer is None:
            assert self._group is not None, "a placement was made for it"
            self._rebalancer = Rebalancer(self._options, self._placement, self._group)
        else:
            self._rebalancer.serve(self._placement)

    def between_steps(self) -> None:
        if self._rebalancer is not None:
            self._rebalancer.after_step()

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"placement": self._told}

    def _told(self) -> dict[str, Any] | None:
        """What the rebalancer tells; None where nothing moves."""
        return None if self._rebalancer is None else self._rebalancer.told()
