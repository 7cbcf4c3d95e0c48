"""The part in each worker: builds a run's speculative decoder, and what its drafts and features' go through."""

from __future__ import annotations

from typing import cast

from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionBackendSpec
from fwk.interfaces.drafting import Drafting, DraftingMaker, DraftingParts, DraftTarget
from fwk.interfaces.feature import WorkerPart, WorkerPartContext
from fwk.interfaces.speculative import SpeculativeContext, SpeculativeDecoder
from fwk_speculative.drafting.chains import ChainDrafting
from fwk_speculative.drafting.checked_decoder import CheckedDecoder, fault_of
from fwk_speculative.drafting.draft_store import DraftStore
from fwk_speculative.drafting.drafting import DecoderDrafting
from fwk_speculative.drafting.part_drafts import NoPartDrafts, PartDrafts
from fwk_speculative.drafting.running_ahead import RunningAhead

MAX_DRAFTED_STATES = 16
"""Sequences of a model with recurrent layers that are drafted for at once, where there is no decoder."""


class DraftingPart(WorkerPart):
    """Has a part in no sequence of its own: a decoder drafts for all, and features for theirs."""

    def drafting(self, target: DraftTarget) -> DraftingMaker | None:
        if not target.algorithm and not target.knows_next:
            return None
        return Maker(self.context, target)


class Maker(DraftingMaker):
    """Builds the decoder, with the layers of its own model if it has one, and then what steps ask."""

    def __init__(self, context: WorkerPartContext, target: DraftTarget) -> None:
        self._context = context
        self._target = target
        self._decoder = self._built() if target.algorithm else None
        few = target.is_recurrent and self._decoder is None
        self.num_slots = min(context.num_slots, MAX_DRAFTED_STATES) if few else context.num_slots
        if self._decoder is not None:
            self.max_drafts = self._decoder.max_drafts
            self.reads_hidden = self._decoder.reads_hidden
            follow = getattr(self._decoder.follow, "__func__", None)
            self.reads_inputs = follow is not SpeculativeDecoder.follow

    def build(self, parts: DraftingParts) -> Drafting:
        target, decoder = self._target, self._decoder
        of_parts = PartDrafts(target.next_parts, parts.table, self.num_slots) if target.knows_next else NoPartDrafts()
        most = 0 if decoder is None else decoder.max_levels
        ahead = RunningAhead(parts.table, parts.inputs.send, self._context.device, most)
        if decoder is None:
            return ChainDrafting(parts, of_parts, ahead)
        if not decoder.acceptance.is_exact:
            self._check_thresholds()
        store: DraftStore | None = None
        if not self._context.is_host:
            slots, send = self._context.num_slots, parts.inputs.send
            store = DraftStore(slots, decoder.max_drafts, self._context.device, send, decoder.max_levels)
            # Of a decoder that drafts late nothing is known to be done that was launched after the step before the one
            # in flight: its passes after three steps' launches, for other sequences after two collected ones.
            num_passes = 5 * (decoder.max_passes + 1) if decoder.drafts_late else decoder.max_passes
            parts.make_room(num_passes)
        runs_ahead = cast("CheckedDecoder", decoder).draws_too_late = self._runs_ahead(decoder)
        return DecoderDrafting(decoder, parts, of_parts, ahead, store, runs_ahead=runs_ahead)

    def _built(self) -> SpeculativeDecoder:
        context, target = self._context, self._target
        assert context.plugins is not None
        asked = f"--speculative-algorithm {target.algorithm} is asked for trees of drafts: {target.name} has"
        if target.is_recurrent and target.shape == "tree":
            raise ConfigError(f"{asked} recurrent layers, which can follow a chain only")
        if target.has_encoder and target.shape == "tree":
            raise ConfigError(f"{asked} an encoder and a decoder, which can follow a chain only")

        def made(options: object = None) -> SpeculativeContext:
            return SpeculativeContext(
                num_slots=context.num_slots,
                max_model_len=target.max_model_len,
                vocab_size=context.vocab_size,
                load_model=target.load_model,
                options=options,
                target=target.model,
                num_target_layers=target.num_layers,
                build=target.build,
                tap=target.tap,
                encode=context.encode,
                is_host=context.is_host,
                upload=context.send,
            )

        decoder = context.plugins.build("speculative", made)
        label = context.plugins.find("speculative", target.algorithm).label
        failed = fault_of(context.size, target.troubles)
        return cast("SpeculativeDecoder", CheckedDecoder(decoder, context.vocab_size, label, failed))

    def _check_thresholds(self) -> None:
        name = self._target.algorithm
        if self._target.shape == "tree":
            raise ConfigError(
                f"--speculative-algorithm {name} drafts trees, whose drafts are kept as the model picks them: "
                "thresholds of acceptance are for chains"
            )
        self._target.reasons.append(f"{name}: sampled outputs leave the model's distribution, as acceptance is relaxed")

    def _runs_ahead(self, decoder: SpeculativeDecoder) -> bool:
        """Whether steps are launched while drafts are being verified, so that only the device knows their lengths."""
        attention = self._context.chosen.get("attention")
        takes_lengths_late = isinstance(attention, AttentionBackendSpec) and "late_lengths" in attention.features
        return (
            (decoder.drafts_ahead or (decoder.drafts_late and decoder.acceptance.is_exact))
            and takes_lengths_late
            and not self._context.is_host
            and not self._target.is_recurrent
            and not self._target.has_encoder
        )
