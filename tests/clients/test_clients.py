"""Each library does a chat, a stream, n = 2, logprobs and an error, and what else it has, against a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
PROGRAMS = Path(__file__).parent / "programs"
COMMON = {"chat", "stream", "n", "logprobs", "error"}
AGENTS = {"chat", "stream", "tool", "structured", "error"}


def run_program(command: list[str], urls: tuple[str, str], wanted: set[str]) -> None:
    """Every check of the program said that it was fine."""
    # A key of the user's own, or a proxy, would lead elsewhere.
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith(("_proxy", "_api_key", "pythonpath"))}
    done = subprocess.run([*command, *urls], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-5000:]}"
    assert {line.removeprefix("ok ") for line in done.stdout.splitlines() if line.startswith("ok ")} == wanted


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
    run_program([str(python_with(package)), str(PROGRAMS / program)], urls, COMMON | more)


@pytest.mark.parametrize(
    ("package", "program"),
    [
        ("anthropic", "with_anthropic.py"),
        ("ollama", "with_ollama.py"),
        ("instructor", "with_instructor.py"),
        ("pydantic-ai-slim[openai]", "with_pydantic_ai.py"),
        ("openai-agents", "with_openai_agents.py"),
        ("dspy", "with_dspy.py"),
        ("llama-index-llms-openai-like", "with_llama_index.py"),
        ("openai", "default_openai.py"),
        ("langchain-openai", "default_langchain.py"),
        ("litellm", "default_litellm.py"),
        ("llm", "default_llm.py"),
    ],
)
def test_a_server_of_no_flags(
    python_with: Callable[[str], Path], default: tuple[str, str], package: str, program: str
) -> None:
    """Agents' libraries with the default model: each asks for a tool and for a structured answer, and gets them."""
    more = {"responses", "batches"} if program == "default_openai.py" else set[str]()
    run_program([str(python_with(package)), str(PROGRAMS / program)], default, AGENTS | more)


@pytest.mark.parametrize(
    ("packages", "program"),
    [
        (("ai", "@ai-sdk/openai"), "with_ai_sdk.mjs"),
        (("@anthropic-ai/sdk",), "with_anthropic_node.mjs"),
        (("openai",), "default_openai_node.mjs"),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_a_server_of_no_flags_from_node(
    node_with: Callable[..., tuple[str, Path]], default: tuple[str, str], packages: tuple[str, ...], program: str
) -> None:
    node, folder = node_with(*packages)
    more = {"responses"} if packages == ("openai",) else set[str]()
    run_program([node, str(shutil.copy(PROGRAMS / program, folder))], default, AGENTS | more)


def test_node(node_with: Callable[..., tuple[str, Path]], urls: tuple[str, str]) -> None:
    node, folder = node_with("openai")
    program = shutil.copy(PROGRAMS / "with_openai_node.mjs", folder)  # it imports from the folder it lies in
    run_program([node, str(program)], urls, COMMON | {"stream_helper", "embeddings", "aborted"})


CODEX = """
model = "scripted"
model_provider = "fwk"
[model_providers.fwk]
name = "fwk"
base_url = "http://127.0.0.1:{port}/v1"
wire_api = "responses"
"""


def test_codex(node_with: Callable[..., tuple[str, Path]], tmp_path: Path) -> None:
    """Codex as npm has it: two calls of its shell and an answer, and a second turn of the same session."""
    _, packages = node_with("@openai/codex")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "scripted_server.py"), str(tmp_path)], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "port").exists():
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.2)
        (home / "config.toml").write_text(CODEX.format(port=(tmp_path / "port").read_text()))
        codex = [str(packages / "node_modules/.bin/codex"), "exec", "--skip-git-repo-check"]
        codex.append("--dangerously-bypass-approvals-and-sandbox")
        for words in (["Write a note and read it"], ["resume", "--last", "What does it say?"]):
            done = subprocess.run(
                [*codex, *words],
                capture_output=True,
                text=True,
                timeout=200,
                cwd=work,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "CODEX_HOME": str(home)},
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert "The note says: " in done.stdout, done.stdout[-3000:]
    finally:
        server.terminate()
        server.wait(60)
    assert (work / "note.txt").read_text() == "written by a tool\n"
    log_text = (tmp_path / "log").read_text()
    assert "tools of type 'web_search' are not offered to the model" in log_text
    assert "Traceback" not in log_text
