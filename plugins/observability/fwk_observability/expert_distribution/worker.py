"""The part in a worker: counts the experts that the router of each layer gave the tokens of a step."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from fwk.errors import ConfigError, InvalidRequest, RequestFailed
from fwk.interfaces.moe import ExpertWeights, MoERunner
from fwk.interfaces.observer import WorkerObserver, WorkerObserverContext
from fwk.types import Batch, ForwardBatch
from fwk_layers import MoE
from fwk_observability._common.layers import follow_method, layers_of
from fwk_observability.expert_distribution import ExpertDistributionOptions
from fwk_process.folders import output_folder

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("fwk.expert_distribution")

LOG_SECONDS = 10.0


@dataclass(slots=True)
class _Step:
    """What a step gave each layer, on the device.

    counts: [num_layers, num_experts] int32. expert_ids: of each layer [num_tokens, top_k], where tokens are kept, with
    token_ids and positions [num_tokens]; wanted are the rows that the last layer was computed for, if not for all.
    """

    number: int
    counts: Tensor
    expert_ids: dict[int, Tensor] = field(default_factory=dict[int, "Tensor"])
    token_ids: Tensor | None = None
    positions: Tensor | None = None
    wanted: Tensor | None = None


class WorkerExperts(WorkerObserver):
    """Counts on the device, without waiting for it; the host reads what it is asked for, and a log line's numbers."""

    wants_steps = True

    def __init__(self, context: WorkerObserverContext) -> None:
        super().__init__(context)
        options: ExpertDistributionOptions = context.options
        self._mode = options.expert_distribution_recorder_mode
        size = options.expert_distribution_recorder_buffer_size
        self._record: deque[_Step] = deque(maxlen=None if size < 0 else size)
        self._is_recording = False
        self._logs = options.enable_expert_distribution_metrics
        self._window: deque[Tensor] = deque(maxlen=options.expert_distribution_window_size)
        self._logged = time.monotonic()
        self._step: _Step | None = None
        self._layers: list[int] = []
        self._num_experts = 0
        self._num_dumps = 0
        self._folder: Path | None = None
        if options.expert_distribution_recorder_folder is not None:
            option = "--expert-distribution-recorder-folder"
            self._folder = output_folder(options.expert_distribution_recorder_folder, option)

    def model_loaded(self, model: Any) -> None:
        found = {name: layer for name, layer in layers_of(model).items() if isinstance(layer, MoE)}
        if not found:
            given = (
                "--enable-expert-distribution-metrics" if self._mode is None else "--expert-distribution-recorder-mode"
            )
            raise ConfigError(f"{given}: this model has no mixture of experts")
        if self.context.rank != 0:
            return  # all ranks route the same tokens alike
        self._layers = [_number(name, place) for place, name in enumerate(found)]
        self._num_experts = max(layer.routing.num_experts for layer in found.values())
        for place, layer in enumerate(found.values()):
            layer.runner = _Followed(layer.runner, place, self._take)
        if self._mode == "per_token":
            follow_method(model, "forward", self._take_inputs)

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"start": self.start, "stop": self.stop, "dump": self.dump}

    def start(self) -> None:
        """Begin a record, without what an earlier one holds. Raises ``InvalidRequest`` while one is under way."""
        if self._is_recording:
            raise InvalidRequest("a record is under way: POST /stop_expert_distribution_record first")
        self._is_recording = True
        self._record.clear()

    def stop(self) -> None:
        """End the record; what it holds can be read. Raises ``InvalidRequest`` when none is under way."""
        if not self._is_recording:
            raise InvalidRequest("no record is under way: POST /start_expert_distribution_record first")
        self._is_recording = False

    def dump(self) -> dict[str, Any] | None:
        """What was recorded since the last one; of the first rank only. Raises ``InvalidRequest`` without a step."""
        if self.context.rank != 0:
            return None
        steps = list(self._record)
        if not steps:
            raise InvalidRequest(
                "nothing was recorded: POST /start_expert_distribution_record, and have tokens computed"
            )
        self._record.clear()
        told = {"replica": self.context.replica, "num_steps": len(steps), "layers": self._layers}
        if self._mode == "stat":
            return told | {"counts": _sum([step.counts for step in steps]).tolist()}
        return told | {"file": str(self._write(steps))}

    def step_begins(self, batch: Batch) -> None:
        self._step = None
        if self.context.rank == 0 and (self._is_recording or self._logs):
            size = len(self._layers), self._num_experts
            self._step = _Step(batch.step, torch.zeros(size, dtype=torch.int32, device=self.context.device))

    def step_launched(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if self._is_recording:
            self._record.append(step)
        if self._logs:
            self._window.append(step.counts)
            if time.monotonic() >= self._logged + LOG_SECONDS:
                self._logged = time.monotonic()
                self._log()

    def _log(self) -> None:
        balance = balancedness(_sum(list(self._window)))
        if len(balance):
            log.info(
                "experts' balance over the last %d steps: %.2f on average, %.2f in the worst layer (1 is even)",
                *(len(self._window), float(balance.mean()), float(balance.min())),
            )

    def _take(self, layer: int, expert_ids: Tensor) -> None:
        step = self._step
        if step is None:
            return
        ids = expert_ids.flatten()
        # bincount would wait for the device, to learn how many there are.
        step.counts[layer].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        if self._mode == "per_token" and self._is_recording:
            step.expert_ids[layer] = expert_ids.to(torch.int16, copy=True)

    def _take_inputs(self, batch: ForwardBatch, output: Any) -> None:
        if self._step is not None and self._is_recording:
            self._step.token_ids = batch.token_ids.clone()
            self._step.positions = batch.positions.clone()
            self._step.wanted = None if batch.hidden_indices is None else batch.hidden_indices.clone()

    def _write(self, steps: list[_Step]) -> Path:
        assert self._folder is not None
        self._num_dumps += 1
        tensors = {"layers": torch.tensor(self._layers)} | (
            _by_token(steps, len(self._layers)) if self._mode == "per_token" else _by_pass(steps)
        )
        name = f"experts-{self._mode}-replica{self.context.replica}-{time.time_ns()}-{self._num_dumps}.safetensors"
        path = self._folder / name
        partial = path.with_name(f".{name}")
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(save({key: tensor.contiguous() for key, tensor in tensors.items()}))
            partial.rename(path)
        except OSError as error:
            raise RequestFailed(f"the record could not be written: {error}") from None
        return path


class _Followed(MoERunner):
    """A runner that tells which experts it was asked for."""

    def __init__(self, runner: MoERunner, layer: int, take: Callable[[int, Tensor], None]) -> None:
        super().__init__(runner.context)
        self._runner, self._layer, self._take = runner, layer, take

    def load(self, experts: ExpertWeights) -> None:
        self._runner.load(experts)

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        self._take(self._layer, expert_ids)
        return self._runner.apply(x, expert_ids, weights)


def balancedness(counts: Tensor) -> Tensor:
    """Tokens [num_layers, num_experts] to [layers that had any] float64: the mean load divided by the largest."""
    busy = counts[counts.amax(-1) > 0].double()
    return busy.mean(-1) / busy.amax(-1)


def _sum(counts: list[Tensor]) -> Tensor:
    return torch.stack(counts).sum(0, dtype=torch.int64).cpu()


def _by_pass(steps: list[_Step]) -> dict[str, Tensor]:
    numbers = torch.tensor([step.number for step in steps])
    return {"steps": numbers, "counts": torch.stack([step.counts for step in steps]).cpu()}


def _by_token(steps: list[_Step], num_layers: int) -> dict[str, Tensor]:
    """expert_ids: [num_tokens, num_layers, top_k] int16; the others [num_tokens].

    -1 stands where the last layer was left out, for a token that nothing was chosen after.
    """
    kept: dict[str, list[Tensor]] = {"steps": [], "token_ids": [], "positions": [], "expert_ids": []}
    top_k = max(ids.shape[1] for step in steps for ids in step.expert_ids.values())
    for step in steps:
        assert step.token_ids is not None
        assert step.positions is not None

        num_tokens = len(step.token_ids)
        found = torch.full((num_tokens, num_layers, top_k), -1, dtype=torch.int16)
        for layer, ids in step.expert_ids.items():
            rows = slice(None) if step.wanted is None or len(ids) == num_tokens else step.wanted.cpu()
            found[rows, layer, : ids.shape[1]] = ids.cpu()
        kept["steps"].append(torch.full((num_tokens,), step.number))
        kept["token_ids"].append(step.token_ids.cpu())
        kept["positions"].append(step.positions.cpu())
        kept["expert_ids"].append(found)
    return {name: torch.cat(parts) for name, parts in kept.items()}


def _number(name: str, place: int) -> int:
    """The layer's place in the model, by the first number of its name."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), place)
