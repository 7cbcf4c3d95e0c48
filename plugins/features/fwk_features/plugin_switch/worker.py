"""The part in each worker: no rank uses another logits processor before every rank has built it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fwk.errors import FwkError
from fwk.interfaces.feature import WorkerPart, WorkerPartContext
from fwk.interfaces.sampling import LogitsProcessor


class ProcessorSwitch(WorkerPart):
    """Exchanges a processor in two steps. Has no part in sequences."""

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._prepared: tuple[str, LogitsProcessor | None] | None = None

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"prepare_processor": self.prepare, "use_processor": self.use}

    def prepare(self, name: str, options: Mapping[str, object], is_on: bool) -> str | None:
        """Build a processor for ``use``, or note that it goes. Returns what is wrong; None when nothing is."""
        self._prepared = None
        processors = self.context.processors()
        if processors is None:
            return "this model does not generate: no logits processor is used in its steps"
        try:
            self._prepared = (name, processors.build(name, options) if is_on else None)
        except FwkError as error:
            return str(error)
        return None

    def use(self) -> None:
        """Use what ``prepare`` built for the sequences to come."""
        assert self._prepared is not None, "prepare comes first, and succeeds"
        prepared, self._prepared = self._prepared, None
        processors = self.context.processors()
        assert processors is not None
        processors.use(*prepared)
