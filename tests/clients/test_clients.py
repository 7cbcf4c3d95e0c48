"""Each library does a chat, a stream, n = 2, logprobs and an error, and what else it has, against a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
PROGRAMS = Path(__file__).parent / "programs"
COMMON = {"chat", "stream", "n", "logprobs", "error"}


def run_program(command: list[str], urls: tuple[str, str], more: set[str]) -> None:
    """Every check of the program said that it was fine."""
    # A key of the user's own, or a proxy, would lead elsewhere.
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith(("_proxy", "_api_key", "pythonpath"))}
    done = subprocess.run([*command, *urls], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-5000:]}"
    assert {line.removeprefix("ok ") for line in done.stdout.splitlines() if line.startswith("ok ")} == COMMON | more


@pytest.mark.parametrize(
    ("package", "program", "more"),
    [
        (
            "openai",
            "with_openai.py",
            {"stream_helper", "parse", "parse_streamed", "tools", "embeddings", "models", "asynchronous"},
        ),
        ("langchain-openai", "with_langchain.py", {"structured", "tools", "embeddings"}),
        ("litellm", "with_litellm.py", {"text_completion", "embeddings", "asynchronous"}),
        ("llm", "with_llm.py", {"command_line"}),
    ],
)
def test_python(
    python_with: Callable[[str], Path], urls: tuple[str, str], package: str, program: str, more: set[str]
) -> None:
    run_program([str(python_with(package)), str(PROGRAMS / program)], urls, more)


def test_node(node_with_openai: tuple[str, Path], urls: tuple[str, str]) -> None:
    node, folder = node_with_openai
    program = shutil.copy(PROGRAMS / "with_openai_node.mjs", folder)  # it imports from the folder it lies in
    run_program([node, str(program)], urls, {"stream_helper", "embeddings", "aborted"})
