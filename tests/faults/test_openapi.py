"""Check 2: /openapi.json documents every route, and schemathesis finds nothing that departs from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rig import Server

LEFT_OUT = "positive_data_acceptance,ignored_auth"
"""The schema cannot say which fields go together, so not all that it allows is served; keys have tests of their own."""

ONE_WORKER = ("--workers", "1")
"""CPython 3.11 counts the depth of ast.parse for all threads together (python/cpython#106905): two workers that meet
there end with a SystemError, which says nothing of the server."""


def schemathesis(server: Server, folder: Path, *options: str) -> None:
    """Requests right and wrong after the schema: no 5xx, and every status, type and body as documented."""
    _run(server, folder, *options)
    server.check_invariants()


def _run(server: Server, folder: Path, *options: str) -> None:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--exclude-checks", LEFT_OUT,
        "--no-shrink", *ONE_WORKER, *options, "--seed", "1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Unresolvable references" not in done.stdout, done.stdout[-3000:]


def test_every_route_documents_its_replies(tiny: Server) -> None:
    paths: dict[str, dict[str, Any]] = tiny.get("/openapi.json").json()["paths"]
    assert len(paths) >= 12
    for path, operations in paths.items():
        for method, operation in operations.items():
            described = operation["responses"]
            assert "200" in described, (method, path)
            assert any(status >= "400" for status in described), (method, path)
            for status, reply in described.items():
                schemas = [content["schema"] for content in reply["content"].values()]
                assert schemas, (method, path, status)
                assert all(schemas), (method, path, status)
            assert (method == "post") == ("requestBody" in operation), (method, path)


def test_nothing_departs_from_it(tiny: Server, tmp_path: Path) -> None:
    schemathesis(tiny, tmp_path, "--phases", "fuzzing", "--max-time", "2")


@pytest.mark.sweep
@pytest.mark.timeout(1500)
def test_nothing_departs_from_it_at_length(tiny: Server, tmp_path: Path) -> None:
    _run(tiny, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-time", "45")
    tiny.settle()  # what every route imports and reserves with its first requests is no leak
    schemathesis(tiny, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "50", "--max-time", "140")
