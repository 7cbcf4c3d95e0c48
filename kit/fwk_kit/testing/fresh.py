"""Child of ``test_works_in_a_fresh_process``: ``python -m fwk_kit.testing.fresh``.

Reads lines of JSON, ``[MODULE:SUITE, FAMILY, NAME, OPTIONS, ENVIRONMENT]``, uses each plugin and writes a line: null,
or the traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import pytest

from fwk_kit.testing import SUITES, suite_of
from fwk_kit.testing.base import PluginSuite

MAX_TRACEBACK = 4000
"""Characters."""


def main() -> None:
    """Until there are no more lines."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what plugins print is no reply
    for line in sys.stdin:
        told = None
        try:
            *asked, environment = json.loads(line)
            os.environ.clear()
            os.environ.update(environment)
            exercise(*asked)
        except Exception:
            told = traceback.format_exc()[-MAX_TRACEBACK:]
        print(json.dumps(told), file=replies, flush=True)


def exercise(where: str, family: str, name: str, options: Mapping[str, object]) -> None:
    """Find the plugin as any process does, and use it."""
    suite = _suite(where, family)
    subject: Any = type("Subject", (suite,), {"plugin": name, "options": options})
    with contextlib.suppress(pytest.skip.Exception):  # what the suite cannot do here, it says in the parent
        subject().exercise(subject.registered())


def _suite(where: str, family: str) -> type[PluginSuite]:
    """The author's own suite where it can be imported by name, else the family's."""
    module, _, name = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return suite_of(family)
    assert family in SUITES
    return found


if __name__ == "__main__":
    main()
