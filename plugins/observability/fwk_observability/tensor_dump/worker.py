"""The part in a worker: keeps what layers return during a step, and writes it when the step was launched."""

from __future__ import annotations

import fnmatch
import logging
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fwk.errors import ConfigError
from fwk.interfaces.observer import WorkerObserver, WorkerObserverContext
from fwk.types import Batch, ForwardBatch
from fwk_observability._common.layers import follow, follow_method, layers_of
from fwk_observability.tensor_dump import TensorDumpOptions
from fwk_process.folders import output_folder

log = logging.getLogger("fwk.tensor_dump")


class WorkerDump(WorkerObserver):
    """A file for each step. Outputs are copied as they are returned: layers change the residual stream in place."""

    wants_steps = True

    def __init__(self, context: WorkerObserverContext) -> None:
        super().__init__(context)
        self._options: TensorDumpOptions = context.options
        self._kept: dict[str, torch.Tensor] | None = None
        self._step = 0
        self._num_written = 0
        parent = Path(self._options.debug_tensor_dump_output_folder or "")
        rank = f"replica{context.replica}-rank{context.rank}"
        self._folder = output_folder(parent / rank, "--debug-tensor-dump-output-folder")

    def model_loaded(self, model: Any) -> None:
        layers = layers_of(model)
        wanted = [name for name in layers if self._is_wanted(name)]
        if not wanted:
            some = ", ".join(list(layers)[:8])
            given = " ".join(self._options.debug_tensor_dump_layers)
            raise ConfigError(f"--debug-tensor-dump-layers {given}: no layer is called so; there are {some}, ...")
        for name in wanted:
            follow(name, layers[name], self._take)
        follow_method(model, "forward", self._take_inputs)
        follow_method(model, "logits", lambda _, output: self._take("logits", output))
        log.info("what %d layers compute is written to %s", len(wanted), self._folder)

    def _is_wanted(self, name: str) -> bool:
        patterns = self._options.debug_tensor_dump_layers
        return not patterns or any(_fits(name, pattern) for pattern in patterns)

    def step_begins(self, batch: Batch) -> None:
        self._step = batch.step
        self._kept = {} if self._num_written < self._options.debug_tensor_dump_max_steps else None

    def step_launched(self) -> None:
        kept, self._kept = self._kept, None
        if kept is None:
            return
        path = self._folder / f"step{self._step:06}.safetensors"
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        data = save({name: tensor.cpu() for name, tensor in kept.items()}, {"step": str(self._step)})
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        partial.rename(path)
        self._num_written += 1
        if self._num_written == self._options.debug_tensor_dump_max_steps:
            log.info("%d steps are written to %s; those to come are not", self._num_written, self._folder)

    def _take_inputs(self, batch: ForwardBatch, output: Any) -> None:
        self._take("token_ids", batch.token_ids)
        self._take("positions", batch.positions)
        self._take("hidden", output)

    def _take(self, name: str, output: Any) -> None:
        """Keep a copy; of several tensors each by its number, of a layer that is called again by that of the call."""
        if self._kept is None:
            return
        if isinstance(output, (tuple, list)):
            for number, one in enumerate(output):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                self._take(f"{name}.{number}", one)
        if not isinstance(output, torch.Tensor):
            return
        count = 1
        while (key := name if count == 1 else f"{name}#{count}") in self._kept:
            count += 1
        self._kept[key] = output.detach().clone(memory_format=torch.contiguous_format)


def _fits(name: str, pattern: str) -> bool:
    """A number stands for that layer and all that is in it, anything else for names, ``*`` and ``?`` in them."""
    if pattern.isdecimal():
        return f".{name}.".find(f".{pattern}.") >= 0
    return fnmatch.fnmatchcase(name, pattern)
