"""The parts of features in a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fwk.errors import BlameSequence, FwkError, PluginFault, one_line_traceback
from fwk.features.declared import declared
from fwk.features.wire import Reader, packed
from fwk.interfaces.attention import AttentionBackend
from fwk.interfaces.drafting import DraftingMaker, DraftTarget
from fwk.interfaces.feature import (
    LoadedModel,
    ModelBuild,
    Plugins,
    StepRunner,
    WorkerCache,
    WorkerPart,
    WorkerPartContext,
)
from fwk.interfaces.grammar_masks import GrammarProcessor, Mask
from fwk.interfaces.graphs import StepPieces
from fwk.interfaces.model import ModelContext
from fwk.interfaces.sampling import SamplingContext
from fwk.interfaces.step import SequenceRecords
from fwk.plugins import PluginFactory, choose
from fwk.types import Batch, Features, ForwardBatch, NewSequence, SequenceResult

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

log = logging.getLogger(__name__)

Made = Sequence[tuple[WorkerPart, Any]]
"""What parts have made of a step on the device, until it is collected."""


class WorkerFeatures:
    """All that take part, in a fixed order: a sequence's part in them is a bit each (``bits``)."""

    def __init__(self, parts: Sequence[tuple[str, WorkerPart]] = (), left_out: Collection[str] = ()) -> None:
        """parts: with the features' keys (``features.name``). left_out: names of those that failed to start."""
        self._left_out = left_out
        self._parts = [part for _, part in parts]
        self._keys = [key for key, _ in parts]
        self._places = {part.context.name: i for i, part in enumerate(self._parts)}
        self._sequences = Reader({part.context.name: part.context.wire.sequence for part in self._parts})
        self._by_bits: dict[int, tuple[WorkerPart, ...]] = {0: ()}
        self.next_parts: dict[int, list[WorkerPart]] = {}
        """By slot, of sequences that have some: the parts that may know what comes next."""

    @property
    def has_drafts(self) -> bool:
        """Whether a part may know what comes next in a sequence."""
        return any(map(_drafts, self._parts))

    def bits(self, new: NewSequence) -> int:
        """Which of them have a part in a sequence."""
        return sum(1 << self._places[name] for name in new.features if name in self._places)

    def of(self, bits: int) -> tuple[WorkerPart, ...]:
        """Those whose bits are set."""
        found = self._by_bits.get(bits)
        if found is None:
            found = self._by_bits[bits] = tuple(p for i, p in enumerate(self._parts) if bits >> i & 1)
        return found

    def begin(self, new: NewSequence) -> None:
        """A sequence takes a slot. Raises ``BlameSequence`` in the name of one that refuses it; then none has begun."""
        begun: list[WorkerPart] = []
        missing = next((name for name in new.features if name in self._left_out), None)
        if missing is not None:
            raise BlameSequence(new.slot, f"the feature {missing!r} failed to start", is_refusal=True)
        for name in new.features:
            if name in self._places:
                part = self._parts[self._places[name]]
                try:
                    part.begin(new, self._sequences.read(new.features, name))
                except (BlameSequence, PluginFault, msgspec.ValidationError) as error:
                    self._forget(begun, new.slot)
                    if isinstance(error, BlameSequence):
                        raise
                    raise BlameSequence(new.slot, str(error)) from error
                begun.append(part)
        knowing = [part for part in begun if _drafts(part)]
        if knowing:
            self.next_parts[new.slot] = knowing

    def forget(self, slot: int, bits: int) -> None:
        """A sequence in which these have a part has left its slot."""
        self.next_parts.pop(slot, None)
        self._forget(self.of(bits), slot)

    @staticmethod
    def _forget(parts: Sequence[WorkerPart], slot: int) -> None:
        for part in parts:
            with suppress(PluginFault):  # the sequence has ended
                part.forget(slot)

    def operations(self) -> dict[str, Callable[..., Any]]:
        """What can be called of them: ``features.name.operation``."""
        return {
            f"{key}.{name}": partial(run_operation, getattr(part.operations, "who", key), name, operation)
            for key, part in zip(self._keys, self._parts, strict=True)
            for name, operation in part.operations().items()
        }

    def kept_bytes(self, takes: frozenset[str]) -> int:
        """What they may keep in memory besides."""
        return sum(part.kept_bytes(takes) for part in self._parts)

    @contextmanager
    def around_captures(self) -> Iterator[None]:
        """What steps are captured within."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.around_captures())
            yield

    def pieces(self, attention: AttentionBackend) -> StepPieces | None:
        """What replays steps with prompts, of the first that does."""
        return next((found for part in self._parts if (found := part.pieces(attention)) is not None), None)

    @property
    def verifies_drafts(self) -> bool:
        """Whether one of them does."""
        return any(type(part).drafting is not WorkerPart.drafting for part in self._parts)

    @property
    def keeps_grammars(self) -> bool:
        """Whether one of them does."""
        return any(type(part).masks is not WorkerPart.masks for part in self._parts)

    def masks(self, context: SamplingContext, table: SequenceRecords, mask: Mask) -> GrammarProcessor | None:
        """What keeps sequences inside their grammars, of the first that does."""
        return next((found for part in self._parts if (found := part.masks(context, table, mask)) is not None), None)

    def drafting(self, target: DraftTarget) -> DraftingMaker | None:
        """What verifies drafts, of the first that does."""
        return next((found for part in self._parts if (found := part.drafting(target)) is not None), None)

    def model_context(self, context: ModelContext, build: ModelBuild) -> list[str]:
        """A model is about to be built. Returns what tells apart the weights of those that change them."""
        told = [(key, part.model_context(context, build)) for key, part in zip(self._keys, self._parts, strict=True)]
        return [f"{key}: {words}" for key, words in told if words]

    def rehearsal(self) -> Callable[[int], Features]:
        """What sequences of the largest step are told, by their number, once all is held that they can ask for."""
        told = {part.context.name: own for part in self._parts if (own := part.rehearsal())}
        return lambda number: {name: packed(own[number % len(own)]) for name, own in told.items()}

    def rehearsed(self) -> None:
        """What was held for it is forgotten."""
        for part in self._parts:
            part.rehearsed()

    def model_loaded(self, loaded: LoadedModel) -> None:
        """The model is there, or another in its place."""
        for part in self._parts:
            part.model_loaded(loaded)

    def cache_allocated(self, cache: WorkerCache) -> None:
        """The KV cache is there."""
        for part in self._parts:
            part.cache_allocated(cache)

    def warmed_up(self) -> None:
        """Steps from here on are of requests."""
        for part in self._parts:
            part.warmed_up()

    def around(self, runner: StepRunner) -> StepRunner:
        """What runs the steps; the runner itself where no part has anything to do around them."""
        for part in self._parts:
            runner = part.around(runner)
        return runner

    def between_steps(self) -> list[Callable[[], None]]:
        """What there is to do between two steps."""
        return [part.between_steps for part in self._parts if type(part).between_steps is not WorkerPart.between_steps]

    def close(self) -> None:
        """The worker stops."""
        for part in self._parts:
            part.close()


def _drafts(part: WorkerPart) -> bool:
    return type(part).next_tokens is not WorkerPart.next_tokens


def run_operation(who: str, name: str, operation: Callable[..., Any], *args: Any) -> Any:
    """Run an operation of a plugin's part in a worker. Raises nothing but ``FwkError``."""
    try:
        return operation(*args)
    except FwkError:
        raise
    except (Exception, SystemExit) as error:
        log.error("%s raised %s in %s: %s", who, type(error).__name__, name, one_line_traceback(error))
        log.debug("what it raised", exc_info=error)
        raise PluginFault(f"{who} raised {type(error).__name__} in {name}") from error


def inputs(parts: Sequence[WorkerPart], batch: Batch, forward: ForwardBatch) -> None:
    """Before the pass."""
    if parts:
        forward.extras, forward.inserted = {}, None  # the object may be that of the step before
        for part in parts:
            part.inputs(batch, forward)


def computed(
    parts: Sequence[WorkerPart], batch: Batch, forward: ForwardBatch, hidden: Tensor, logits: Tensor | None
) -> Made:
    """After the pass."""
    made = [(part, part.computed(batch, forward, hidden, logits)) for part in parts]
    return [(part, own) for part, own in made if own is not None]


def put_results(made: Made, results: dict[int, SequenceResult], gone: set[int] | frozenset[int] = frozenset()) -> None:
    """Into the results of those that are still there, of which a chunk of a prompt has none yet."""
    for part, own in made:
        for slot, told in part.results(own).items():
            if slot not in gone:
                result = results.setdefault(slot, SequenceResult(slot, []))
                if isinstance(told, BlameSequence):
                    result.error, result.is_refusal = str(told), told.is_refusal
                else:
                    result.features = {**result.features, part.context.name: packed(told)}


def wants_hidden(parts: Sequence[WorkerPart], slots: np.ndarray) -> bool:
    """Whether one of them does."""
    return any(part.wants_hidden(slots) for part in parts)


class PartPlugins:
    """``Plugins`` of a worker. chosen gets the names of those that parts choose, by family; reasons, why not others."""

    def __init__(self, factory: PluginFactory, chosen: dict[str, str], reasons: list[str]) -> None:
        self._factory = factory
        self._chosen = chosen
        self._reasons = reasons
        self._names: dict[str, list[str]] = {}
        self.build, self.build_all, self.items = factory.build, factory.build_all, factory.items
        self.find, self.joining, self.load = factory.find, factory.joining, factory.load

    def choose(self, family: str, name: str, context: Callable[..., object], **fields: Any) -> Any:
        assert self._factory.resolution is not None
        selection = choose(self._factory.plugins, family, name, self._factory.resolution.facts)
        assert selection.chosen is not None, "choose raises when nothing is possible"
        names = self._names.setdefault(family, [])
        names.append(selection.chosen.name)
        self._chosen[family] = ", ".join(names)
        self._reasons.extend(selection.reasons())
        return self._factory.build(selection.chosen, context, **fields)


def build_worker_features(
    factory: PluginFactory, context: Callable[..., WorkerPartContext], plugins: Plugins, only: str = ""
) -> WorkerFeatures:
    """The parts of all features that are on, or of one. context: lacks name, wire, options and plugins."""
    parts: list[tuple[str, WorkerPart]] = []
    left_out: set[str] = set()
    for item, spec, options in declared(factory):
        if spec.worker and only in ("", item.name):
            own = context(name=item.name, wire=spec.wire, options=options, plugins=plugins)
            part = factory.build_or_leave_out(item, own, spec.worker)
            if part is None:
                left_out.add(item.name)
            else:
                parts.append((item.key, part))
    return WorkerFeatures(parts, left_out)
