"""The served model built anew with the weights of another checkpoint, alongside the one that serves."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fwk.config import Config
from fwk.errors import ModelLoadError
from fwk.interfaces.feature import ModelRebuild
from fwk.interfaces.model import Encoder, Model, ModelContext
from fwk.setup.checkpoint import OpenedModel, open_model
from fwk.setup.resolve import ModelSetup
from fwk.worker.loading.model_builder import ModelBuilder
from fwk_files.fingerprint import fingerprint
from fwk_process.malloc import large_blocks_returned
from fwk_process.threads import half_of_torchs_threads

log = logging.getLogger(__name__)

_MAY_DIFFER = frozenset({"raw", "torch_dtype", "eos_token_ids"})
"""Fields of a model's config that settle nothing of the run: it keeps its precision, and the tokens that end a text."""

Built = tuple[Model | Encoder, ModelContext]


class Rebuilding(ModelRebuild):
    """What features' parts have of it.

    - ``is_greedy``: as in ``ModelContext``.
    - ``run``: runs steps with a model whose layers ``models`` has adopted; set once there is one.
    """

    run: Callable[[Model | Encoder], None]

    def __init__(self, config: Config, setup: ModelSetup, models: ModelBuilder) -> None:
        self._config = config
        self._setup = setup
        self._models = models
        self.is_greedy: Tensor | None = None

    @torch.inference_mode()
    def build(self, model: str, load_format: str | None) -> tuple[str, Built]:
        own = {"model": model, "load_format": load_format or self._config.model.load_format, "revision": None}
        config = replace(self._config, model=self._config.model.model_copy(update=own))
        with half_of_torchs_threads(), large_blocks_returned():
            opened = open_model(config, self._setup.factory.plugins, log.info)
            _check_same(self._setup, opened)
            identity = opened.checkpoint.weights_identity()
            found = fingerprint(opened.path, identity)
            built = self._models.rebuild_served(opened, self.is_greedy)
        if fingerprint(opened.path, identity) != found:
            raise ModelLoadError(f"the files of {model} changed while they were read")
        return found, built

    @torch.inference_mode()
    def serve(self, built: Any) -> None:
        model, context = built
        self._models.adopt(context)
        self.run(model)

    def trim(self) -> None:
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
