"""A server with the chat dialects whose model is a script: two calls of a shell tool and an answer, or a file.

``scripted_server.py FOLDER``: writes its address to ``FOLDER/listening``.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import uvicorn

from fwk.config import ServerOptions
from fwk.interfaces.dialect import DialectContext, GenerateInput, ModelCard
from fwk.interfaces.parser import ParserContext
from fwk.server.app import Reports, build_app
from fwk_http.admission import AdmissionController
from fwk_http.keys import Keys
from fwk_kit.testing import fake_frontend
from fwk_kit.testing.fake_frontend import FakeFrontend, Step, deltas_of
from fwk_parsers.json.parser import JsonParser
from fwk_server.anthropic.dialect import AnthropicDialect
from fwk_server.ollama.dialect import OllamaDialect
from fwk_server.openai.dialect import OpenAIDialect
from fwk_server.openai_responses.dialect import ResponsesDialect

COMMANDS = ("echo written by a tool > note.txt", "cat note.txt")
SHELLS = {"exec_command": "cmd", "Bash": "command", "bash": "command", "run_shell_command": "command"}
"""Agents' tools that run a command, and the argument that has it: Codex's, Claude Code's and Continue's, opencode's and
pi's, Qwen Code's."""
WHOLE_FILE = "note.txt\n```\nwritten by a tool\n```\n"
"""What aider reads as a file to write: it offers no tools."""
BY_PROMPT = "To call a function, reply with JSON ONLY"
"""In what LiteLLM's route ``ollama/`` makes of tools: a part of the prompt."""
CONTEXT = 1_000_000
"""An agent's instructions are ten thousands of bytes, each of which is a token here."""


def build(frontend: FakeFrontend) -> None:
    """Have the frontend call a shell for each command, and answer when there is a result of the last."""

    def script(item: GenerateInput) -> Iterable[Step]:
        seen = frontend.text.seen
        names = {tool["function"]["name"] for tool in seen.tools or ()}
        number = sum(message["role"] == "tool" for message in seen.messages)
        text = f"The note says: {seen.messages[-1]['content']}" if names else WHOLE_FILE
        if BY_PROMPT in str(seen.messages[-1]["content"]):
            text = json.dumps({"name": "Bash", "arguments": {"command": COMMANDS[0]}})
        shell = next((name for name in SHELLS if name in names), None)
        if shell is not None and number < len(COMMANDS):
            text = json.dumps({"name": shell, "arguments": {SHELLS[shell]: COMMANDS[number]}})
        return [[delta] for delta in deltas_of(item, text)]

    frontend.script = script
    frontend.grammar_kinds = frozenset({"json_object"})  # which LiteLLM asks for with tools in the prompt
    frontend.card = ModelCard("scripted", "org/scripted", 1_700_000_000, CONTEXT, fake_frontend.VOCAB_SIZE)
    frontend.tool_parser = lambda tools, prompt_tail="", is_forced=False: JsonParser(ParserContext(tools, prompt_tail))


def main(folder: Path) -> None:
    fake_frontend.MAX_MODEL_LEN = CONTEXT
    frontend = FakeFrontend()
    build(frontend)
    spoken = (OpenAIDialect, ResponsesDialect, AnthropicDialect, OllamaDialect)
    dialects = [make(DialectContext(frontend)) for make in spoken]
    app = build_app(
        dialects,
        [],
        reports=Reports(lambda: None, lambda: None, dict),
        keys=Keys(),
        admission=AdmissionController(ServerOptions(), 100),
        max_body_bytes=1 << 22,
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    (folder / "address").write_text(f"http://127.0.0.1:{listener.getsockname()[1]}")
    (folder / "address").rename(folder / "listening")  # whole, once it is there
    uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none")).run(sockets=[listener])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
