"""Other weights for the model that serves: read and checked alongside it, then put in its place."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fwk.config import Config
from fwk.errors import FwkError, ModelLoadError, one_line_traceback
from fwk.interfaces.model import Encoder, Model, ModelContext
from fwk.process.malloc import large_blocks_returned
from fwk.process.threads import half_of_torchs_threads
from fwk.setup.checkpoint import OpenedModel, open_model
from fwk.setup.resolve import ModelSetup
from fwk.worker.kv.identity import fingerprint
from fwk.worker.loading.model_builder import ModelBuilder

log = logging.getLogger(__name__)

_MAY_DIFFER = frozenset({"raw", "torch_dtype", "eos_token_ids"})
"""Fields of a model's config that settle nothing of the run: it keeps its precision, and the tokens that end a text."""


class WeightUpdate:
    """The operations of a worker. What was built anew waits between ``prepare`` and ``use`` or ``discard``.

    The model is built as at the start, by the same loader, quantizers and layers, so that its tokens are those of a
    server that starts from the checkpoint, and everything that refuses a checkpoint there refuses it here. Until
    ``use``, what serves is not touched.
    """

    def __init__(
        self,
        config: Config,
        setup: ModelSetup,
        models: ModelBuilder,
        is_greedy: Tensor | None,
        serve: Callable[[Model | Encoder], None],
    ) -> None:
        """serve: run steps with a model whose layers ``models`` has adopted."""
        self._config = config
        self._setup = setup
        self._models = models
        self._is_greedy = is_greedy
        self._serve = serve
        self._prepared: tuple[Model | Encoder, ModelContext] | None = None

    def operations(self) -> dict[str, Callable[..., Any]]:
        return {"prepare_weights": self.prepare, "use_weights": self.use, "discard_weights": self.discard}

    @torch.inference_mode()
    def prepare(self, model: str, load_format: str) -> dict[str, str]:
        """Build the model with the weights of a checkpoint: its ``fingerprint``, or the ``error`` to tell."""
        self.discard()
        try:
            with half_of_torchs_threads(), large_blocks_returned():
                return {"fingerprint": self._build(model, load_format)}
        except (FwkError, OSError) as error:
            why = str(error)
        except torch.OutOfMemoryError:
            why = "the device has no room for them alongside the others: start with a lower --mem-fraction-static"
        except Exception as error:  # of a loader or a model that met what it did not foresee: what serves is whole
            log.error("%s could not be read: %s", model, one_line_traceback(error))
            why = f"{model} could not be read: {type(error).__name__}: {error}"
        self._trim()
        return {"error": why}

    def _build(self, model: str, load_format: str) -> str:
        own = {"model": model, "load_format": load_format, "revision": None}
        config = replace(self._config, model=self._config.model.model_copy(update=own))
        opened = open_model(config, self._setup.factory.plugins, log.info)
        _check_same(self._setup, opened)
        identity = opened.checkpoint.weights_identity()
        found = fingerprint(opened.path, identity)
        prepared = self._models.rebuild_served(opened, self._is_greedy)
        if fingerprint(opened.path, identity) != found:
            raise ModelLoadError(f"the files of {model} changed while they were read")
        self._prepared = prepared
        return found

    @torch.inference_mode()
    def use(self) -> None:
        """Serve what was prepared. The K/V and states of before are those of other weights from here on."""
        assert self._prepared is not None, "use comes after prepare"
        (model, context), self._prepared = self._prepared, None
        self._models.adopt(context)
        self._serve(model)
        self._trim()

    def discard(self) -> None:
        """Forget what was prepared."""
        if self._prepared is not None:
            self._prepared = None
            self._trim()

    def _trim(self) -> None:
        """Give back what a model took that is used no more."""
        num_frozen = gc.get_freeze_count()
        gc.unfreeze()
        gc.collect()
        if num_frozen:
            gc.freeze()
        if not self._setup.device.is_host:
            self._setup.device.trim(self._models.device)


def _check_same(setup: ModelSetup, opened: OpenedModel) -> None:
    """Raise ``ModelLoadError`` unless everything that was settled for the served model holds for another, too."""
    old, new = setup.opened, opened
    for field in fields(old.config):
        before, after = getattr(old.config, field.name), getattr(new.config, field.name)
        if field.name not in _MAY_DIFFER and before != after:
            raise ModelLoadError(
                f"{new.name} is another model: its {field.name} is {after}, that of the served one {before}"
            )
    if (old.served, old.max_model_len) != (new.served, new.max_model_len):
        raise ModelLoadError(f"{new.name} is made for something else than the served model: {new.served}, {old.served}")
    layouts = new.checkpoint.weights().layouts("")
    if set(layouts) != set(setup.facts.layouts):
        raise ModelLoadError(
            f"the weights of {new.name} are stored as {' and '.join(layouts)}, those of the served model as "
            f"{' and '.join(setup.facts.layouts)}"
        )
