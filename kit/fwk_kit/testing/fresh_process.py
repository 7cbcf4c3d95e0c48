"""A process in which plugins are used that has run none of the tests: ``test_works_in_a_fresh_process``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO

SECONDS = 300.0
"""For one plugin to be used once."""


class FreshProcess:
    """Starts with the first plugin, and uses one after another. Where one ends it, the next one starts another."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def exercise(self, where: str, family: str, name: str, options: Mapping[str, object]) -> str | None:
        """Have the suite ``where`` (``MODULE:SUITE``) use the plugin: None, or the last of what it failed with."""
        child = self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        late = threading.Timer(SECONDS, child.kill)
        late.start()
        try:
            child.stdin.write(json.dumps([where, family, name, options, dict(os.environ)]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        if line:
            return json.loads(line)
        child.wait()
        assert self._errors is not None
        self._errors.seek(0)
        told = self._errors.read()[-4000:]
        self.close()
        return f"the process ended with code {child.returncode}: {told}"

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None:
            self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "fwk_kit.testing.fresh"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            )  # fmt: skip
        return self._child

    def close(self) -> None:
        """End the process."""
        if self._child is None or self._errors is None:
            return
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._errors.close()
        self._child = self._errors = None
