"""The helper process: ``python -m fwk.server.helper_process``, started by ``fwk_jobs.client``."""

from __future__ import annotations

import os
import signal
import sys

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

_decode = msgspec.msgpack.Decoder(GrammarJob).decode


class GrammarJobs:
    """Compiles what it is given; the grammar itself is dropped."""

    def __init__(self, setup: HelperSetup) -> None:
        config = from_plain(setup.config)
        plugins = discover(config.plugins.allow_override)
        opened = open_model(config, plugins, lambda line: None)
        vocab_size = opened.config.vocab_size
        text = model_text(opened.checkpoint, config.model, vocab_size)
        self._grammars = Grammars(
            PluginFactory(plugins, config.plugin_options), lambda: text, vocab_size, opened.eos_token_ids
        )

    def prepare(self, job: Job) -> None:
        """Build the backend: once."""
        self._grammars.use(_decode(job.body).backend)
        self._grammars.build()

    def run(self, job: Job) -> bytes:
        self._grammars.compile(_decode(job.body).request)
        return b""


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
