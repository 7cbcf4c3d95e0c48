"""The helper process: ``python -m fwk.server.helper_process``, started by ``fwk_jobs.client``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import msgspec

from fwk.config.wire import from_plain
from fwk.errors import InvalidRequest
from fwk.features.jobs import build_job_part
from fwk.interfaces.feature import JobPartContext
from fwk.plugins import PluginFactory, discover
from fwk.plugins.audit import Audit
from fwk.server.helper import HelperSetup
from fwk.setup.checkpoint import open_model
from fwk.text import model_text
from fwk_jobs.fork_server import ForkServer
from fwk_jobs.frames import Job
from fwk_process.malloc import Heap
from fwk_process.oom import prefer_as_victim
from fwk_process.parent import ignore_terminal_signals

NICENESS = 5
"""Of what steps are not to wait for: a quarter of a core that one wants too, so that what waits for it has it soon."""


class ServedText:
    """The model's tokenizer and configuration, opened when the first job needs them."""

    def __init__(self, setup: HelperSetup) -> None:
        self.config = from_plain(setup.config)
        self.plugins = discover(self.config.plugins.allow_override)
        Audit(self.plugins, is_strict=self.config.plugins.strict)
        self.factory = PluginFactory(self.plugins, self.config.plugin_options)
        self.opened = open_model(self.config, self.plugins, lambda line: None)
        self.vocab_size = self.opened.config.vocab_size
        self.text = model_text(self.opened.checkpoint, self.config.model, self.vocab_size)


class FeatureJobs:
    """Jobs of one feature."""

    def __init__(self, served: ServedText, kind: str) -> None:
        opened = served.opened
        context = partial(
            JobPartContext,
            model_name=opened.name,
            config=opened.config,
            checkpoint=opened.checkpoint,
            text=served.text,
            inputs=opened.served.inputs,
            eos_token_ids=opened.eos_token_ids,
        )
        self._part = build_job_part(served.factory, kind.partition(".")[2], context)

    def prepare(self, job: Job) -> None:
        """Build what jobs have in common, for the first of them."""
        self._part.prepare(job.body)

    def run(self, job: Job) -> bytes:
        if job.is_warm_up:
            return b""
        if not self._part.is_urgent:
            _lower_priority()  # of this fork
        return self._part.run(job.body)


class Jobs:
    """All kinds, by name."""

    def __init__(self, setup: HelperSetup) -> None:
        self._served = cache(partial(ServedText, setup))
        self._kinds: dict[str, FeatureJobs] = {}

    def prepare(self, job: Job) -> None:
        """Build its feature's part with the first, and what it needs; at a low priority while nothing waits for it."""
        if not job.is_warm_up:
            self._prepare(job)
            return
        # The priority is a thread's own: the process could not raise its own again. The thread ends before any fork.
        with ThreadPoolExecutor(1, initializer=_lower_priority) as thread:
            thread.submit(self._prepare, job).result()
        Heap().trim()  # what building took besides

    def _prepare(self, job: Job) -> None:
        if job.kind not in self._kinds:
            self._kinds[job.kind] = FeatureJobs(self._served(), job.kind)
        self._kinds[job.kind].prepare(job)

    def run(self, job: Job) -> bytes:
        return self._kinds[job.kind].run(job)


def _lower_priority() -> None:
    """Of the calling thread, as the system knows a thread's own."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def main() -> None:
    """Serve until standard input is closed."""
    ignore_terminal_signals()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    prefer_as_victim()
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)  # no more: jobs follow
        if not part:
            return
        line += part
    target = os.dup(1)
    os.dup2(2, 1)  # whatever a plugin prints is no answer
    jobs = Jobs(msgspec.json.decode(line, type=HelperSetup))
    ForkServer(0, target, jobs.prepare, jobs.run, InvalidRequest).serve()


if __name__ == "__main__":
    sys.exit(main())
