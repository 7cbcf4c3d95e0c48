"""Each library does a chat, a stream, n = 2, logprobs and an error, and what else it has, against a real server."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.helpers.images import encoded, noise

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
PROGRAMS = Path(__file__).parent / "programs"
COMMON = {"chat", "stream", "n", "logprobs", "error"}
AGENTS = {"chat", "stream", "tool", "structured", "error"}


def run_program(command: list[str], urls: Sequence[str], wanted: set[str]) -> None:
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
        ("smolagents[openai]", "default_smolagents.py"),
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
    ("package", "checks"),
    [
        ("openai", {"chat", "stream", "responses", "responses_file", "asynchronous", "error"}),
        ("anthropic", {"chat", "stream", "count_tokens", "tool_result", "error"}),
        ("ollama", {"chat", "stream", "generate", "capabilities", "error"}),
        ("litellm", {"openai", "anthropic", "ollama_chat", "ollama", "responses", "asynchronous"}),
        ("langchain-openai", {"image_url", "image_block", "source_type", "responses"}),
    ],
)
def test_a_picture_through_each_door(
    python_with: Callable[[str], Path], seeing: str, package: str, checks: set[str]
) -> None:
    picture = base64.b64encode(encoded(noise(1))).decode()
    program = PROGRAMS / f"pictures_{package.partition('-')[0]}.py"
    run_program([str(python_with(package)), str(program)], (seeing, picture), checks)


def test_the_requests_of_tools_that_are_not_installed(default: tuple[str, str]) -> None:
    """Open WebUI and VS Code."""
    checks = {"open_webui_ollama", "open_webui_openai", "vs_code_ollama", "vs_code_chat"}
    run_program([sys.executable, str(PROGRAMS / "as_editors_ask.py")], default, checks)


@pytest.mark.parametrize(
    ("packages", "program"),
    [
        (("ai", "@ai-sdk/openai"), "with_ai_sdk.mjs"),
        (("ai", "@ai-sdk/openai-compatible"), "with_ai_sdk.mjs"),
        (("ai", "@ai-sdk/anthropic"), "with_ai_sdk.mjs"),
        (("@anthropic-ai/sdk",), "with_anthropic_node.mjs"),
        (("openai",), "default_openai_node.mjs"),
    ],
    ids=lambda given: given if isinstance(given, str) else given[-1],
)
def test_a_server_of_no_flags_from_node(
    node_with: Callable[..., tuple[str, Path]], default: tuple[str, str], packages: tuple[str, ...], program: str
) -> None:
    node, folder = node_with(*packages)
    more = {"responses"} if packages == ("openai",) else set[str]()
    provider = packages[1:]
    run_program([node, str(shutil.copy(PROGRAMS / program, folder)), *provider], default, AGENTS | more)


def test_node(node_with: Callable[..., tuple[str, Path]], urls: tuple[str, str]) -> None:
    node, folder = node_with("openai")
    program = shutil.copy(PROGRAMS / "with_openai_node.mjs", folder)  # it imports from the folder it lies in
    run_program([node, str(program)], urls, COMMON | {"stream_helper", "embeddings", "aborted"})


GUIDE = Path(__file__).parents[2] / "docs/guides/connect-your-tool.md"


def settings(tool: str, url: str) -> str:
    """The first block of a tool's section of the guide, for the server at this address."""
    _, _, section = GUIDE.read_text().partition(f"\n## {tool}\n")
    block = re.search(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert block is not None, tool
    return block[1].replace("http://127.0.0.1:8000", url).replace("smollm2-135m-instruct", "scripted")


def variables(tool: str, url: str) -> dict[str, str]:
    """The settings of a tool that reads them from the environment."""
    return dict(line.split("=", 1) for line in settings(tool, url).splitlines())


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address and the log of a server whose model is a script."""
    folder = tmp_path_factory.mktemp("scripted")
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "scripted_server.py"), str(folder)], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 120
        while not (folder / "listening").exists():
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield (folder / "listening").read_text(), folder / "log"
    finally:
        server.terminate()
        server.wait(60)
    assert "Traceback" not in (folder / "log").read_text()


class Agent:
    """A terminal agent with a home and a working folder of its own, and nothing of the user's environment."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        subprocess.run(["git", "init", "-q"], cwd=self.work, check=True)
        self._environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TERM": "dumb", **environment}

    def says(self, *words: str | Path) -> str:
        """What it prints, once it ends well."""
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            env=self._environment,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    def wrote_the_note(self) -> bool:
        return (self.work / "note.txt").read_text() == "written by a tool\n"


TURNS = ("Write a note and read it", "What does it say?")


def test_codex(node_with: Callable[..., tuple[str, Path]], scripted: tuple[str, Path], tmp_path: Path) -> None:
    """Codex as npm has it: two calls of its shell and an answer, and a second turn of the same session."""
    _, packages = node_with("@openai/codex")
    url, log = scripted
    agent = Agent(tmp_path)
    (agent.home / ".codex").mkdir()
    (agent.home / ".codex/config.toml").write_text(settings("Codex", url))
    run = [packages / "node_modules/.bin/codex", "exec", "--skip-git-repo-check"]
    run.append("--dangerously-bypass-approvals-and-sandbox")
    for words in ([TURNS[0]], ["resume", "--last", TURNS[1]]):
        assert "The note says: " in agent.says(*run, *words)
    assert agent.wrote_the_note()
    assert "tools of type 'web_search' are not offered to the model" in log.read_text()


def test_claude_code(node_with: Callable[..., tuple[str, Path]], scripted: tuple[str, Path], tmp_path: Path) -> None:
    """Claude Code as npm has it: the same."""
    _, packages = node_with("@anthropic-ai/claude-code")
    url, _ = scripted
    agent = Agent(tmp_path, **variables("Claude Code", url))
    # npm keeps the program in a package for each machine; a script that npm may not run would link it
    [program] = (packages / "node_modules/@anthropic-ai").glob("claude-code-*/claude")
    for words in ([TURNS[0]], ["--continue", TURNS[1]]):
        assert "The note says: " in agent.says(program, "--print", "--allowedTools=Bash", *words)
    assert agent.wrote_the_note()


def test_continue(node_with: Callable[..., tuple[str, Path]], scripted: tuple[str, Path], tmp_path: Path) -> None:
    """Continue's command line, which reads what its extensions of editors read: the same."""
    _, packages = node_with("@continuedev/cli")
    url, _ = scripted
    agent = Agent(tmp_path, CONTINUE_TELEMETRY_ENABLED="0")
    config = agent.home / "config.yaml"
    config.write_text(settings("Continue", url))
    run = [packages / "node_modules/.bin/cn", "--config", config, "--auto"]
    for words in (["--print", TURNS[0]], ["--resume", "--print", TURNS[1]]):
        assert "The note says: " in agent.says(*run, *words)
    assert agent.wrote_the_note()


def test_opencode(node_with: Callable[..., tuple[str, Path]], scripted: tuple[str, Path], tmp_path: Path) -> None:
    """opencode as npm has it: the same."""
    _, packages = node_with("opencode-ai")
    url, _ = scripted
    agent = Agent(tmp_path, OPENCODE_DISABLE_AUTOUPDATE="1")
    (agent.work / "opencode.json").write_text(settings("opencode", url))
    # npm keeps the program in a package for each machine, which its own starter finds; the second is for older CPUs
    [program] = (packages / "node_modules").glob("opencode-*[46]/bin/opencode")
    for words in ([TURNS[0]], ["--continue", TURNS[1]]):
        assert "The note says: " in agent.says(program, "run", *words)
    assert agent.wrote_the_note()


def test_qwen_code(node_with: Callable[..., tuple[str, Path]], scripted: tuple[str, Path], tmp_path: Path) -> None:
    """Qwen Code as npm has it: the same."""
    _, packages = node_with("@qwen-code/qwen-code")
    url, _ = scripted
    agent = Agent(tmp_path, **variables("Qwen Code", url))
    run = [packages / "node_modules/.bin/qwen", "--auth-type", "openai", "--yolo"]
    for words in (["--prompt", TURNS[0]], ["--continue", "--prompt", TURNS[1]]):
        assert "The note says: " in agent.says(*run, *words)
    assert agent.wrote_the_note()


def test_pi(node_with: Callable[..., tuple[str, Path]], scripted: tuple[str, Path], tmp_path: Path) -> None:
    """pi as npm has it: the same."""
    _, packages = node_with("@mariozechner/pi-coding-agent")
    url, _ = scripted
    agent = Agent(tmp_path)
    (agent.home / ".pi/agent").mkdir(parents=True)
    (agent.home / ".pi/agent/models.json").write_text(settings("pi", url))
    run = [packages / "node_modules/.bin/pi", "--provider", "fwk", "--model", "scripted", "--print"]
    for words in ([TURNS[0]], ["--continue", TURNS[1]]):
        assert "The note says: " in agent.says(*run, *words)
    assert agent.wrote_the_note()


LLM_TOOL = """
def Bash(command: str) -> str:
    "Run a command."
    import subprocess
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
"""


@pytest.mark.parametrize("way", [(), ("--no-stream",)], ids=["stream", "no stream"])
def test_llm(
    python_with: Callable[[str], Path], scripted: tuple[str, Path], tmp_path: Path, way: tuple[str, ...]
) -> None:
    """simonw's llm, its command line: two calls of a function and an answer, and a second turn of the conversation."""
    url, _ = scripted
    agent = Agent(tmp_path, LLM_USER_PATH=str(tmp_path / "llm"))
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm/extra-openai-models.yaml").write_text(settings("llm", url))
    run = [python_with("llm").with_name("llm"), "--model", "fwk", "--key", "none", "--functions", LLM_TOOL, *way]
    for words in ([TURNS[0]], ["--continue", TURNS[1]]):
        assert "The note says: " in agent.says(*run, *words)
    assert agent.wrote_the_note()


def test_litellm_by_the_routes_of_ollama(
    python_with: Callable[[str], Path], urls: tuple[str, str], scripted: tuple[str, Path]
) -> None:
    """``ollama/``, ``ollama_chat/``: both leave ``tool_choice`` out, so that a script is the model that calls."""
    calls = {"tool", "tool_streamed", "tool_by_prompt"}
    checks = {"chat", "stream", "error", "text_completion", "embeddings", "asynchronous"}
    program = str(PROGRAMS / "with_litellm_ollama.py")
    run_program([str(python_with("litellm")), program], (*urls, scripted[0]), checks | calls)


def test_aider(python_with: Callable[[str], Path], scripted: tuple[str, Path], tmp_path: Path) -> None:
    """aider, which calls no tools: it writes the file that the answer holds."""
    url, _ = scripted
    agent = Agent(tmp_path, **variables("aider", url))
    aider = python_with("aider-chat").with_name("aider")
    agent.says(
        aider, "--model=openai/scripted", "--edit-format=whole", "--yes-always", "--no-auto-commits",
        "--no-check-update", "--no-show-model-warnings", "--analytics-disable", f"--message={TURNS[0]}", "note.txt",
    )  # fmt: skip
    assert agent.wrote_the_note()
