"""Build what drafts tokens in a worker, for the model to verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from fwk.config import Config
from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionBackendSpec
from fwk.interfaces.device import Upload
from fwk.interfaces.model import Encoder, Model
from fwk.interfaces.speculative import SpeculativeContext, SpeculativeDecoder
from fwk.setup.resolve import ModelSetup
from fwk.worker.drafting.checked_decoder import CheckedDecoder, fault_of
from fwk.worker.drafting.draft_store import DraftStore
from fwk.worker.drafting.drafting import Drafting, NoDrafting
from fwk.worker.drafting.part_drafts import NoPartDrafts, PartDrafts
from fwk.worker.loading.model_builder import ModelBuilder
from fwk.worker.runner.inputs import InputBuffers
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.runner.staging import StagingRing
from fwk.worker.sampling.pipeline import SamplingPipeline

MAX_DRAFTED_STATES = 16
"""Sequences of a model with recurrent layers that are drafted for at once, where there is no decoder."""


@dataclass(eq=False, slots=True)
class DraftingBuilder:
    """Builds a worker's speculative decoder, and what its drafts go through; features' parts may draft without one.

    encode: text to token ids. upload: brings an array to the device. rings: host buffers that steps copy from. reasons,
    troubles: lists of sentences that it adds to.
    """

    config: Config
    setup: ModelSetup
    models: ModelBuilder
    encode: Callable[[str], list[int]]
    upload: Upload
    rings: Sequence[StagingRing]
    reasons: list[str]
    troubles: list[str]

    def decoder(self, model: Model | Encoder, num_ranks: int) -> SpeculativeDecoder | None:
        """The speculative decoder, with the layers of its own model if it has one; None without one."""
        if "speculative" not in self.setup.resolution.selections:
            return None
        assert isinstance(model, Model), "a model that does not generate is refused drafts"
        opened, name = self.setup.opened, self.config.engine.speculative_algorithm
        if opened.served.is_recurrent and self.setup.resolution.facts.drafts == "tree":
            raise ConfigError(
                f"--speculative-algorithm {name} is asked for trees of drafts: {opened.name} has recurrent layers, "
                "which can follow a chain only"
            )
        if opened.served.encoder is not None and self.setup.resolution.facts.drafts == "tree":
            raise ConfigError(
                f"--speculative-algorithm {name} is asked for trees of drafts: {opened.name} has an encoder and a "
                "decoder, which can follow a chain only"
            )
        factory = self.setup.factory
        decoder = factory.build(
            "speculative",
            SpeculativeContext,
            num_slots=self.config.engine.max_running_requests,
            max_model_len=self.setup.max_model_len,
            vocab_size=opened.config.vocab_size,
            load_model=self.models.build_draft,
            target=model,
            num_target_layers=opened.config.num_layers,
            build=partial(self.models.build_head, model),
            tap=self.models.tap,
            encode=self.encode,
            is_host=self.setup.device.is_host,
            upload=self.upload,
        )
        failed = fault_of(num_ranks, self.troubles)
        label = factory.item("speculative").label
        return cast("SpeculativeDecoder", CheckedDecoder(decoder, opened.config.vocab_size, label, failed))

    def num_slots(self, *, has_decoder: bool) -> int:
        """Sequences that may have drafts: where layers keep states, a second state of each is kept for that."""
        options, served = self.config.engine, self.setup.opened.served
        if self.setup.opened.runner == "pool" or not (has_decoder or self.models.features.has_drafts):
            return 0
        few = served.is_recurrent and not has_decoder
        return min(options.max_running_requests, MAX_DRAFTED_STATES) if few else options.max_running_requests

    def build(
        self,
        decoder: SpeculativeDecoder | None,
        table: SequenceTable,
        inputs: InputBuffers,
        sampling: SamplingPipeline,
        num_slots: int,
    ) -> NoDrafting:
        """What drafts go through, those of features' parts among them."""
        drafting = NoDrafting() if decoder is None else self._of_decoder(decoder, table, inputs, sampling)
        features = self.models.features
        drafting.of_parts = PartDrafts(features, table, num_slots) if features.has_drafts else NoPartDrafts()
        return drafting

    def _of_decoder(
        self, decoder: SpeculativeDecoder, table: SequenceTable, inputs: InputBuffers, sampling: SamplingPipeline
    ) -> Drafting:
        name = self.config.engine.speculative_algorithm
        if not decoder.acceptance.is_exact:
            if self.setup.resolution.facts.drafts == "tree":
                raise ConfigError(
                    f"--speculative-algorithm {name} drafts trees, whose drafts are kept as the model picks them: "
                    "thresholds of acceptance are for chains"
                )
            self.reasons.append(f"{name}: sampled outputs leave the model's distribution, as acceptance is relaxed")
        sampling.acceptance = decoder.acceptance
        num_taps = len(self.models.wanted_taps)
        store: DraftStore | None = None
        if not self.setup.device.is_host:
            num_slots = self.config.engine.max_running_requests
            store = DraftStore(num_slots, decoder.max_drafts, self.models.device, self.upload, decoder.max_levels)
            # Of a decoder that drafts late nothing is known to be done that was launched after the step before the one
            # in flight: its passes after three steps' launches, for other sequences after two collected ones.
            num_passes = 5 * (decoder.max_passes + 1) if decoder.drafts_late else decoder.max_passes
            for ring in self.rings:
                ring.grow(num_passes)
        attention, layers = self.models.attention, self.models.layers
        return Drafting(
            decoder, table, inputs, attention, layers, sampling, num_taps, store, runs_ahead=self._runs_ahead(decoder)
        )

    def _runs_ahead(self, decoder: SpeculativeDecoder) -> bool:
        """Whether steps are launched while drafts are being verified, so that only the device knows their lengths."""
        attention = self.setup.factory.item("attention").declaration if self.models.layers else None
        takes_lengths_late = isinstance(attention, AttentionBackendSpec) and "late_lengths" in attention.features
        return (
            (decoder.drafts_ahead or (decoder.drafts_late and decoder.acceptance.is_exact))
            and takes_lengths_late
            and not self.setup.device.is_host
            and not self.setup.opened.served.is_recurrent
            and self.setup.opened.served.encoder is None
        )
