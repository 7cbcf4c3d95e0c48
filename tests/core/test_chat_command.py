"""``fwk chat``: its commands, what it sends, and what it takes from the terminal."""

from __future__ import annotations

import io
import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from fwk.errors import RequestFailed
from fwk_kit.cli import chat as module
from fwk_kit.cli.chat import Chat, _converse
from fwk_kit.cli.terminal import MAX_HISTORY_BYTES, CommandCompleter, MarkdownWriter, complete_blocks


class Model:
    """Answers with the number of messages; says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []

    def __call__(self, messages: Any, sampling: Any) -> Iterator[str]:
        self.asked.append(([one["content"] for one in messages], dict(sampling)))
        if messages[-1]["content"] == "fail":
            raise RequestFailed("no")
        yield f"answer {len(messages)}"


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str) -> tuple[Model, Chat]:
    rest = list(lines)

    def read() -> str:
        if not rest:
            raise EOFError
        return rest.pop(0)

    monkeypatch.setattr("builtins.input", read)
    model = Model()
    chat = Chat(model, "Be kind.")
    assert _converse(chat) == 0
    return model, chat


def test_a_conversation_and_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "saved.json"
    model, _ = talk(
        monkeypatch, "one", "/set temperature 0.5", "/set top_k=7", "/retry", "/set top_k", "two \\", "lines", "fail",
        f"/save {file}", "/undo", "/show",
        "/set temperature x", "/nothing", "/system Be brief.", "three", "/exit", "never",
    )  # fmt: skip
    first = ["Be kind.", "one"]
    assert model.asked[0] == (first, {})
    assert model.asked[1] == (first, {"temperature": 0.5, "top_k": 7})
    assert model.asked[2] == ([*first, "answer 2", "two \nlines"], {"temperature": 0.5})
    assert model.asked[3][0][-1] == "fail"
    assert [one["role"] for one in json.loads(file.read_text())] == ["system", "user", "assistant", "user", "assistant"]
    assert model.asked[4] == (["Be brief.", "three"], {})  # a setting that is no number is the default again
    assert len(model.asked) == 5
    told = capsys.readouterr()
    assert "error: no" in told.err
    assert "temperature must be a number" in told.err
    assert "/retry" in told.err, "an unknown command shows the list"
    assert "answer 4" in told.out


def test_an_answer_is_cut_short_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(messages: Any, sampling: Any) -> Iterator[str]:
        yield "begun"
        raise KeyboardInterrupt

    chat = Chat(answer)
    chat.say("x")
    assert chat.messages[-1] == {"role": "assistant", "content": "begun"}


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PipeInput]:
    """What a person types at a terminal, in an empty home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with create_pipe_input() as typed, create_app_session(input=typed, output=DummyOutput()):
        yield typed


def test_a_person_edits_lines_and_finds_those_of_earlier_sessions(keyboard: PipeInput, tmp_path: Path) -> None:
    model = Model()
    keyboard.send_text("tw\x1b[Do\x1b[C\x7fo \\\rlines\x1b\rand more\r/set temperature 0.5\rbye\x03last\r\x04")
    assert _converse(Chat(model)) == 0
    assert [asked[0][-1] for asked in model.asked] == ["too \nlines\nand more", "last"]
    assert model.asked[1][1] == {"temperature": 0.5}
    file = tmp_path / "fwk/chat_messages"
    assert file.stat().st_mode & 0o77 == 0, "it is nobody else's"
    keyboard.send_text("\x1b[A\r\x04")
    assert _converse(Chat(model)) == 0
    assert model.asked[2][0][-1] == "last"
    file.write_text("\n# old\n+first\n" + "\n# new\n+kept\n" * (MAX_HISTORY_BYTES // 10))
    keyboard.send_text("\x1b[A\r\x04")
    assert _converse(Chat(model)) == 0
    assert model.asked[3][0][-1] == "kept"
    assert file.stat().st_size < MAX_HISTORY_BYTES
    assert "first" not in file.read_text()


@pytest.mark.parametrize(
    ("text", "offered"),
    [("/s", ["/set", "/show"]), ("/set t", ["top_p"]), ("/set top_p 0", []), ("/nothing t", []), ("s", []), ("", [])],
)
def test_commands_are_completed(text: str, offered: list[str]) -> None:
    completer = CommandCompleter({"/set": ("top_p", "seed"), "/show": ()})
    found = list(completer.get_completions(Document(text), CompleteEvent()))
    assert [completion.text for completion in found] == offered
    assert all(text.endswith(completion.text[: -completion.start_position]) for completion in found)


def test_a_home_that_cannot_be_written_to_costs_the_history_alone(keyboard: PipeInput, tmp_path: Path) -> None:
    (tmp_path / "fwk").write_text("a file where the folder would be")
    keyboard.send_text("one\r\x04")
    model = Model()
    assert _converse(Chat(model)) == 0
    assert len(model.asked) == 1


def test_an_answer_is_shown_as_markdown() -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None, legacy_windows=False)
    writer = MarkdownWriter(console)
    for piece in ("# Ti", "tle\n", "\n- a\n- **b**\n\n", "```py\n\x1b]0;owned\x07x = 1\n", "\ny = 2\n```\n", "en", "d"):
        writer.write(piece)
    writer.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert shown.count("Title") >= 1
    assert " • a" in shown
    assert "**" not in shown
    assert "```" not in shown
    assert shown.rstrip().endswith("end")
    assert "\x1b]0;" not in shown, "an answer's own escape sequences do not reach the terminal"
    assert "\x07" not in shown


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("a\nb\n\nc", "a\nb\n\n"),
        ("a\n\n", "a\n\n"),
        ("```\na\n\nb", ""),
        ("~~~~ py\na\n\n~~~\n\n```\n\n~~~~\n\nb", "~~~~ py\na\n\n~~~\n\n```\n\n~~~~\n\n"),
        ("x\n\n```\na\n\nb", "x\n\n"),
        ("a", ""),
    ],
)
def test_blocks_are_complete_where_no_further_text_changes_them(text: str, finished: str) -> None:
    assert complete_blocks(text) == (finished, text[len(finished) :])


def test_a_conversation_without_an_answer_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(["one", "fail", EOFError()])

    def read() -> str:
        line = next(said)
        if isinstance(line, EOFError):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    assert _converse(Chat(Model())) == 1
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # it does not listen
        for address in (f"http://127.0.0.1:{nobody.getsockname()[1]}", "http://127.0.0.1:x"):
            assert module.run(["--url", address]) == 1
            assert f"{address}: " in capsys.readouterr().err
