"""Child of ``test_works_in_a_fresh_process``: ``python -m fwk_kit.testing.fresh MODULE:SUITE FAMILY NAME OPTIONS``."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import Any

import pytest

from fwk_kit.testing import SUITES, suite_of
from fwk_kit.testing.base import PluginSuite


def main(where: str, family: str, name: str, options: str) -> int:
    """Find the plugin as any process does, and use it."""
    suite = _suite(where, family)
    subject: Any = type("Subject", (suite,), {"plugin": name, "options": json.loads(options)})
    with contextlib.suppress(pytest.skip.Exception):  # what the suite cannot do here, it says in the parent
        subject().exercise(subject.registered())
    return 0


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
    sys.exit(main(*sys.argv[1:]))
