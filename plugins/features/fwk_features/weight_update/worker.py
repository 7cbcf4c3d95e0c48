"""The part in each worker: the model with other weights, alongside the one that serves until it takes its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fwk.errors import FwkError, one_line_traceback
from fwk.interfaces.feature import ModelRebuild, WorkerPart, WorkerPartContext

log = logging.getLogger(__name__)


class WorkerWeights(WorkerPart):
    """What was built anew waits between ``prepare`` and ``use`` or ``discard``."""

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._prepared: Any = None

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"prepare": self.prepare, "use": self.use, "discard": self.discard}

    @property
    def _rebuild(self) -> ModelRebuild:
        assert self.context.rebuild is not None
        return self.context.rebuild

    def prepare(self, model: str, load_format: str | None = None) -> dict[str, str]:
        """Build the model with the weights of a checkpoint: its ``fingerprint``, or the ``error`` to tell."""
        self.discard()
        try:
            found, self._prepared = self._rebuild.build(model, load_format)
            return {"fingerprint": found}
        except (FwkError, OSError) as error:
            why = str(error)
        except torch.OutOfMemoryError:
            why = "the device has no room for them alongside the others: start with a lower --mem-fraction-static"
        except Exception as error:  # of a loader or a model that met what it did not foresee: what serves is whole
            log.error("%s could not be read: %s", model, one_line_traceback(error))
            why = f"{model} could not be read: {type(error).__name__}: {error}"
        self._rebuild.trim()
        return {"error": why}

    def use(self) -> None:
        """Serve what was prepared. The K/V and states of before are those of other weights from here on."""
        assert self._prepared is not None, "use comes after prepare"
        prepared, self._prepared = self._prepared, None
        self._rebuild.serve(prepared)
        del prepared
        self._rebuild.trim()

    def discard(self) -> None:
        """Forget what was prepared."""
        if self._prepared is not None:
            self._prepared = None
            self._rebuild.trim()
