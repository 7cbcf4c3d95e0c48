"""The logits processors of a worker: built at start-up, and exchanged while the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fwk.errors import FwkError, shaped
from fwk.interfaces.sampling import LogitsProcessor, LogitsProcessorSpec
from fwk.plugins import PluginFactory, Registered, find
from fwk.plugins.answers import checked
from fwk.worker.sampling.pipeline import Place, SamplingPipeline

FAMILY = "logits_processors"


def _edited(answer: Any, logits: Tensor, view: Any) -> str | None:
    return shaped(answer, logits.shape, logits.dtype)


class ProcessorBuilder:
    """Builds logits processors in the context of one worker.

    context: makes a ``SamplingContext`` from the plugin's ``options``.
    """

    def __init__(self, factory: PluginFactory, context: Callable[..., object]) -> None:
        self._factory = factory
        self._context = context

    def build_all(self) -> dict[Place, LogitsProcessor]:
        """Every processor that takes part."""
        built = self._factory.build_all(FAMILY, self._context, host=None)
        return {_place(item): checked(item, processor, apply=_edited) for item, processor in built}

    def build(self, name: str, values: dict[str, object]) -> LogitsProcessor:
        """One processor with other options than the run's. Raises ``FwkError``."""
        item = find(self._factory.plugins, FAMILY, name)
        return checked(
            item, PluginFactory(self._factory.plugins, {item.key: values}).build(item, self._context), apply=_edited
        )

    def place(self, name: str) -> Place:
        """Where a processor stands among the others. Raises ``PluginError`` for an unknown name."""
        return _place(find(self._factory.plugins, FAMILY, name))


class ProcessorSwitch:
    """Exchanges a processor in two steps: no rank uses the new one before every rank has built it."""

    def __init__(self, builder: ProcessorBuilder, pipeline: SamplingPipeline) -> None:
        self._builder = builder
        self._pipeline = pipeline
        self._prepared: tuple[Place, LogitsProcessor | None] | None = None

    def prepare(self, name: str, values: dict[str, object], is_on: bool) -> str | None:
        """Build a processor for ``use``, or note that it goes. Returns what is wrong; None when nothing is."""
        self._prepared = None
        try:
            place = self._builder.place(name)
            self._prepared = (place, self._builder.build(name, values) if is_on else None)
        except FwkError as error:
            return str(error)
        return None

    def use(self) -> None:
        """Use what ``prepare`` built for the sequences to come."""
        assert self._prepared is not None, "prepare comes first, and succeeds"
        prepared, self._prepared = self._prepared, None
        self._pipeline.switch(*prepared)

    def operations(self) -> dict[str, Callable[..., Any]]:
        """The worker operations by which the engine exchanges processors."""
        return {"prepare_processor": self.prepare, "use_processor": self.use}


def _place(item: Registered) -> Place:
    assert isinstance(item.declaration, LogitsProcessorSpec)
    return Place(item.declaration.order, item.name)
