"""What a feature's part that verifies drafts is given of a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fwk.config import Config
from fwk.errors import ConfigError
from fwk.interfaces.drafting import Drafting, DraftingMaker, DraftingParts, DraftTarget
from fwk.interfaces.model import Encoder, Model
from fwk.setup.resolve import ModelSetup
from fwk.types import ForwardBatch
from fwk.worker.loading.model_builder import ModelBuilder
from fwk.worker.runner.inputs import InputBuffers
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.runner.staging import StagingRing
from fwk.worker.sampling.pipeline import SamplingPipeline

NO_DRAFTS = "no feature that is installed and on verifies drafts; fwk's is features.drafting"


@dataclass(eq=False, slots=True)
class DraftsBuilder:
    """Has a feature's part build what drafts go through.

    plan: what attention makes of a batch. rings: host buffers that steps copy from. chosen: names by family. reasons,
    troubles: as in ``DraftTarget``.
    """

    config: Config
    setup: ModelSetup
    models: ModelBuilder
    plan: Callable[[ForwardBatch], Any]
    rings: Sequence[StagingRing]
    chosen: dict[str, str]
    reasons: list[str]
    troubles: list[str]

    def algorithm(self) -> str:
        """The speculative decoder that is asked for; empty: none. Raises ``ConfigError`` where nothing verifies."""
        if "speculative" not in self.setup.resolution.selections:
            return ""
        algorithm = self.config.engine.speculative_algorithm
        if not self.models.features.verifies_drafts:
            raise ConfigError(f"--speculative-algorithm {algorithm}: {NO_DRAFTS} (fwk plugins list)")
        return algorithm

    def maker(self, model: Model | Encoder) -> DraftingMaker | None:
        """What makes and verifies drafts of the served model; None where there are none."""
        features, opened, served = self.models.features, self.setup.opened, self.setup.opened.served
        if not isinstance(model, Model) or opened.runner != "generate":
            return None
        target = DraftTarget(
            model=model,
            name=opened.name,
            algorithm=self.algorithm(),
            shape=self.setup.resolution.facts.drafts,
            num_layers=opened.config.num_layers,
            max_model_len=self.setup.max_model_len,
            is_recurrent=served.is_recurrent,
            has_encoder=served.encoder is not None,
            knows_next=features.has_drafts,
            next_parts=features.next_parts,
            load_model=self.models.build_draft,
            build=partial(self.models.build_head, model),
            tap=self.models.tap,
            reasons=self.reasons,
            troubles=self.troubles,
        )
        made = features.drafting(target)
        if made is None and features.has_drafts:
            self.chosen["drafts"] = f"none ({NO_DRAFTS})"
        return made

    def build(
        self, maker: DraftingMaker | None, table: SequenceTable, inputs: InputBuffers, sampling: SamplingPipeline
    ) -> Drafting:
        """What steps ask."""
        if maker is None:
            return Drafting()
        num_taps = len(self.models.wanted_taps)
        return maker.build(DraftingParts(table, inputs, sampling, self._planned, self._move, self._make_room, num_taps))

    def _planned(self, batch: ForwardBatch) -> ForwardBatch:
        batch.plan = self.plan(batch)
        return batch

    def _move(self, group: int, source: Tensor, target: Tensor) -> None:
        layers = [layer for layer in self.models.layers if layer.kv_group == group]
        self.models.attention.move(layers, source, target)

    def _make_room(self, num_passes: int) -> None:
        for ring in self.rings:
            ring.grow(num_passes)
