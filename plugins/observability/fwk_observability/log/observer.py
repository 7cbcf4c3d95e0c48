"""The observer: writes statistics from a thread of its own, and requests as they end."""

from __future__ import annotations

import gc
import logging
import threading
import time

from fwk.interfaces.observer import Observer, ObserverContext, RequestRecord
from fwk.types import EngineStats
from fwk_observability.log import LogOptions
from fwk_observability.log.requests import BEGINNINGS, fields, sentence
from fwk_observability.log.statistics import Statistics

log = logging.getLogger("fwk.log")


class LogObserver(Observer):
    """Writes to the server's log at level info, so ``--log-level warning`` leaves all of it out."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self._options: LogOptions = context.options or LogOptions()
        self.wants_content = self._options.log_requests and self._options.log_requests_level >= BEGINNINGS
        self._stats = self._before = EngineStats()
        self._started = self._looked = time.monotonic()
        self._was_busy = False
        self._num_requests = self._num_prompt_tokens = self._num_output_tokens = 0
        self._stopped = threading.Event()
        self._collection_started = 0.0
        if self._options.gc_warning_threshold_secs:
            gc.callbacks.append(self._collection)
        if self._options.log_stats_interval:
            threading.Thread(target=self._run, name="fwk-log-stats", daemon=True).start()

    def step_finished(self, stats: EngineStats) -> None:
        self._stats = stats

    def request_finished(self, record: RequestRecord) -> None:
        self._num_requests += 1
        self._num_prompt_tokens += record.num_prompt_tokens
        self._num_output_tokens += record.num_output_tokens
        if self._options.log_requests and log.isEnabledFor(logging.INFO):
            found = fields(record, self._options.log_requests_level, self._options.max_log_len, self.context.decode)
            log.info("%s", sentence(found), extra={"fields": {"event": "request", **found}})

    def write_statistics(self, now: float) -> None:
        """One line for the time since the last look; none while nothing happens, after one that says so."""
        stats, before, seconds = self._stats, self._before, now - self._looked
        self._before, self._looked = stats, now
        is_busy = bool(stats.num_running or stats.num_waiting or stats.steps != before.steps)
        if is_busy or self._was_busy:
            found = Statistics.between(before, stats, max(seconds, 1e-6))
            log.info("%s", found, extra={"fields": {"event": "statistics", **found.fields()}})
        self._was_busy = is_busy

    def _collection(self, phase: str, info: dict[str, int]) -> None:
        """Called by Python around each garbage collection; collections do not overlap."""
        if phase == "start":
            self._collection_started = time.monotonic()
            return
        seconds = time.monotonic() - self._collection_started
        if self._collection_started and seconds >= self._options.gc_warning_threshold_secs:
            found = {"generation": info["generation"], "collected": info["collected"], "seconds": round(seconds, 3)}
            log.warning(
                "a garbage collection of generation %(generation)d took %(seconds)s s and freed %(collected)d objects",
                found,
                extra={"fields": {"event": "garbage_collection", **found}},
            )

    def close(self) -> None:
        self._stopped.set()
        if self._options.gc_warning_threshold_secs:
            gc.callbacks.remove(self._collection)
        found = {
            "requests": self._num_requests,
            "prompt_tokens": self._num_prompt_tokens,
            "output_tokens": self._num_output_tokens,
            "seconds": round(time.monotonic() - self._started, 1),
        }
        log.info(
            "stopped after %(seconds)s s: %(requests)d requests, %(prompt_tokens)d prompt tokens, "
            "%(output_tokens)d output tokens",
            found,
            extra={"fields": {"event": "stopped", **found}},
        )

    def _run(self) -> None:
        while not self._stopped.wait(self._options.log_stats_interval):
            self.write_statistics(time.monotonic())
