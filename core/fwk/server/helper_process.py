"""The helper process: ``python -m fwk.server.helper_process``, started by ``fwk_jobs.client``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import msgspec

from fwk.config.wire import from_plain
from fwk.errors import InvalidRequest
from fwk.interfaces.multimodal import MediaItem
from fwk.plugins import PluginFactory, discover
from fwk.plugins.audit import Audit
from fwk.process.oom import prefer_as_victim
from fwk.server.helper import GrammarJob, HelperSetup, MediaJob
from fwk.setup.checkpoint import open_model
from fwk.text import model_text
from fwk.text.grammars import Grammars
from fwk.text.media import MediaPlacer, processor_item
from fwk_jobs.fork_server import ForkServer
from fwk_jobs.frames import Job

WARM_UP_NICENESS = 5
"""A quarter of a core that a step wants too: little, and a grammar that comes meanwhile is still not kept waiting."""

_decode_grammar = msgspec.msgpack.Decoder(GrammarJob).decode
_decode_media = msgspec.msgpack.Decoder(MediaJob).decode


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


class GrammarJobs:
    """Compiles what it is given; the grammar itself is dropped."""

    def __init__(self, served: Callable[[], ServedText]) -> None:
        self._served = served
        self._opened: Grammars | None = None

    def _grammars(self) -> Grammars:
        if self._opened is None:
            served = self._served()
            eos = served.opened.eos_token_ids
            self._opened = Grammars(served.factory, lambda: served.text, served.vocab_size, eos)
        return self._opened

    def prepare(self, job: Job) -> None:
        """Build the backend: once, and at a low priority while no grammar waits for it."""
        work = _decode_grammar(job.body)
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
        request = _decode_grammar(job.body).request
        if request is not None:
            self._grammars().compile(request)
        return b""


class MediaJobs:
    """Places media in prompts."""

    def __init__(self, served: Callable[[], ServedText]) -> None:
        self._served = served
        self._placer: MediaPlacer | None = None

    def prepare(self, job: Job) -> None:
        """Build the processor, once."""
        if self._placer is None:
            served = self._served()
            opened = served.opened
            item = processor_item(served.plugins, opened.config, opened.served.media, opened.name)
            assert item is not None, "the server asks for media of models that take some"
            options = served.config.model
            self._placer = MediaPlacer(served.factory, item, opened.config, opened.checkpoint, served.text, options)

    def run(self, job: Job) -> bytes:
        work = _decode_media(job.body)
        if not work.items:
            return b""
        assert self._placer is not None
        items = [MediaItem(kind, data, name) for kind, data, name in work.items]
        return msgspec.msgpack.encode(self._placer.place(work.token_ids, items, Path(work.path)))


class Jobs:
    """All kinds, by name."""

    def __init__(self, setup: HelperSetup) -> None:
        served = cache(partial(ServedText, setup))
        self._kinds: dict[str, GrammarJobs | MediaJobs] = {"grammar": GrammarJobs(served), "media": MediaJobs(served)}

    def prepare(self, job: Job) -> None:
        self._kinds[job.kind].prepare(job)

    def run(self, job: Job) -> bytes:
        return self._kinds[job.kind].run(job)


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
    jobs = Jobs(msgspec.json.decode(line, type=HelperSetup))
    ForkServer(0, target, jobs.prepare, jobs.run, InvalidRequest).serve()


if __name__ == "__main__":
    sys.exit(main())
