"""The profiler of one worker: torch.profiler around its steps, and a file of what it saw."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fwk.errors import ConfigError, InvalidRequest
from fwk.interfaces.observer import WorkerObserver, WorkerObserverContext
from fwk.types import Batch
from fwk_observability.profiler import ProfilerOptions
from fwk_process.folders import output_folder

log = logging.getLogger("fwk.profiler")

_DEVICES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


class WorkerProfiler(WorkerObserver):
    """One profile at a time: begun by a call, ended by another or after so many steps, written by a thread.

    All of it but the writing happens on the thread that computes the steps: the profiler follows that one.
    """

    wants_steps = True

    def __init__(self, context: WorkerObserverContext) -> None:
        super().__init__(context)
        self._options: ProfilerOptions = context.options
        self._profile: profile | None = None
        self._range = ExitStack()
        self._num_left = 0
        self._num_done = 0
        self._path: Path | None = None
        self._file: dict[str, Any] | None = None
        self._writer: threading.Thread | None = None

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "start": self.start,
            "stop": self.stop,
            "cancel": self.cancel,
            "file": lambda: self._file,
            "state": lambda: self.state,
        }

    @property
    def state(self) -> str:
        """``profiling``, ``writing``, ``written``, or ``idle`` when there was none yet."""
        if self._profile is not None:
            return "profiling"
        return "idle" if self._path is None else "writing" if self._file is None else "written"

    def start(self, settings: dict[str, Any]) -> None:
        """Begin. Raises ``InvalidRequest``, also for a folder that is not to be had."""
        if self.state in ("profiling", "writing"):
            raise InvalidRequest("a profile is under way: POST /stop_profile first")
        activities, has_memory = self._activities(settings["activities"])
        try:
            folder = output_folder(settings["folder"], "--profiler-dir")
        except ConfigError as error:
            raise InvalidRequest(f"output_dir: {error}", "output_dir") from None
        path = folder / f"{settings['name']}-replica{self.context.replica}-rank{self.context.rank}.trace.json.gz"
        if path.exists():
            raise InvalidRequest(f"{path.name} is there already: choose another profile_id", "profile_id")
        self._profile = profile(
            activities=activities,
            record_shapes=settings["record_shapes"],
            profile_memory=has_memory,
            with_stack=settings["with_stack"],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one profile only there is nothing to warn
            self._profile.start()
        self._path, self._file = path, None
        self._num_left, self._num_done = settings["num_steps"], 0

    def _activities(self, names: list[str] | None) -> tuple[list[ProfilerActivity], bool]:
        own = None if self.context.is_host else _DEVICES.get(self.context.device.type)
        if names is None:
            return [ProfilerActivity.CPU, *([own] if own else [])], self._options.profiler_memory
        if "GPU" in names and own is None:
            raise InvalidRequest(f"activities: there is no GPU, this server computes on {self.context.device.type}")
        wanted = {"CPU": ProfilerActivity.CPU, "GPU": own}
        found = [kind for name, kind in wanted.items() if name in names and kind is not None]
        return found or [ProfilerActivity.CPU], "MEM" in names

    def step_begins(self, batch: Batch) -> None:
        if self._profile is None:
            return
        num_tokens = sum(s.num_new_tokens for s in batch.sequences)
        name = f"step {self._num_done}: {len(batch.sequences)} sequences, {num_tokens} tokens"
        self._range.enter_context(record_function(name))

    def step_launched(self) -> None:
        if self._profile is None:
            return
        self._range.close()
        self._num_done += 1
        self._num_left -= 1
        if self._num_left <= 0:
            self._end()

    def stop(self) -> None:
        """End the profile; its file is written soon. Raises ``InvalidRequest`` when there was none."""
        if self._path is None:
            raise InvalidRequest("no profile was begun: POST /start_profile")
        self._end()

    def cancel(self) -> None:
        """End it without a file: another worker could not begin."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = self._path = None

    def _end(self) -> None:
        ended, self._profile = self._profile, None
        if ended is None or self._path is None:
            return
        if not self.context.is_host and self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)  # what was launched belongs to it
        ended.stop()
        self._writer = threading.Thread(target=self._write, args=(ended, self._path), name="fwk-trace", daemon=True)
        self._writer.start()

    def _write(self, ended: profile, path: Path) -> None:
        partial = path.with_name(f".{path.name.removesuffix('.gz')}.{os.getpid()}.gz")
        error = ""
        try:
            ended.export_chrome_trace(str(partial))
            partial.rename(path)
            log.info("the profile of %d steps is in %s", self._num_done, path)
        except Exception as raised:
            partial.unlink(missing_ok=True)
            error = f"{type(raised).__name__}: {raised}"
            log.error("the profile could not be written: %s", error)
        self._file = {"path": str(path), "num_steps": self._num_done, "error": error}

    def close(self) -> None:
        self.cancel()
        if self._writer is not None:
            self._writer.join(1.0)
