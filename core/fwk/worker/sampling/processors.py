"""The logits processors of a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fwk.errors import shaped
from fwk.interfaces.feature import Processors
from fwk.interfaces.sampling import LogitsProcessor, LogitsProcessorSpec
from fwk.plugins import PluginFactory, Registered, find
from fwk.plugins.answers import checked
from fwk.worker.sampling.pipeline import Place, SamplingPipeline

FAMILY = "logits_processors"


def _edited(answer: Any, logits: Tensor, view: Any) -> str | None:
    return shaped(answer, logits.shape, logits.dtype)


class WorkerProcessors(Processors):
    """Builds logits processors in the context of one worker.

    context: makes a ``SamplingContext`` from the plugin's ``options``. pipeline: that uses them, once it is there.
    """

    pipeline: SamplingPipeline

    def __init__(self, factory: PluginFactory, context: Callable[..., object]) -> None:
        self._factory = factory
        self._context = context

    def build_all(self) -> dict[Place, LogitsProcessor]:
        """Every processor that takes part."""
        built = self._factory.build_all(FAMILY, self._context, host=None)
        return {_place(item): checked(item, processor, apply=_edited) for item, processor in built}

    def build(self, name: str, options: Mapping[str, object]) -> LogitsProcessor:
        item = find(self._factory.plugins, FAMILY, name)
        factory = PluginFactory(self._factory.plugins, {item.key: options})
        return checked(item, factory.build(item, self._context), apply=_edited)

    def use(self, name: str, processor: LogitsProcessor | None) -> None:
        self.pipeline.switch(_place(find(self._factory.plugins, FAMILY, name)), processor)


def _place(item: Registered) -> Place:
    assert isinstance(item.declaration, LogitsProcessorSpec)
    return Place(item.declaration.order, item.name)
