"""The helper process: ``python -m fwk.server.helper_process``, started by ``fwk_jobs.client``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from fwk.config.wire import from_plain
from fwk.errors import InvalidRequest
from fwk.plugins import PluginFactory, discover
from fwk.process.oom import prefer_as_victim
from fwk.server.helper import GrammarJob, HelperSetup
from fwk.setup.checkpoint import open_model
from fwk.text import model_text
from fwk.text.grammars import Grammars
from fwk_jobs.fork_server import ForkServer
from fwk_jobs.frames import Job

WARM_UP_NICENESS = 5
"""A quarter of a core that a step wants too: little, and a grammar that comes meanwhile is still not kept waiting."""

_decode = msgspec.msgpack.Decoder(GrammarJob).decode


class GrammarJobs:
    """Compiles what it is given; the grammar itself is dropped."""

    def __init__(self, setup: HelperSetup) -> None:
        self._setup = setup
        self._opened: Grammars | None = None

    def _grammars(self) -> Grammars:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> Grammars:
        config = from_plain(self._setup.config)
        plugins = discover(config.plugins.allow_override)
        opened = open_model(config, plugins, lambda line: None)
        vocab_size = opened.config.vocab_size
        text = model_text(opened.checkpoint, config.model, vocab_size)
        return Grammars(PluginFactory(plugins, config.plugin_options), lambda: text, vocab_size, opened.eos_token_ids)

    def prepare(self, job: Job) -> None:
        """Build the backend: once, and at a low priority while no grammar waits for it."""
        work = _decode(job.body)
        if work.request is not None:
            self._build(work.backend)
            return
        # The priority is a thread's own: the process could not raise its own again. The thread ends before any fork.
        with ThreadPoolExecutor(1, initializer=_lower_priority) as thread:
            thread.submit(self._build, work.backend).result()

    def _build(self, backend: str) -> None:
        grammars = self._grammars()
        grammars.use(backend)
        grammars.build()

    def run(self, job: Job) -> bytes:
        request = _decode(job.body).request
        if request is not None:
            self._grammars().compile(request)
        return b""


def _lower_priority() -> None:
    """Of the calling thread, as the system knows a thread's own."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + WARM_UP_NICENESS)


def main() -> None:
    """Serve until standard input is closed."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # what a terminal sends goes to all; the parent decides
    prefer_as_victim()
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)  # no more: jobs follow
        if not part:
            return
        line += part
    target = os.dup(1)
    os.dup2(2, 1)  # whatever a plugin prints is no answer
    jobs = GrammarJobs(msgspec.json.decode(line, type=HelperSetup))
    ForkServer(0, target, jobs.prepare, jobs.run, InvalidRequest).serve()


if __name__ == "__main__":
    sys.exit(main())
