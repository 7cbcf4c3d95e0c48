"""``fwk chat``: its commands, what it sends, and what it takes from the terminal."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fwk.errors import RequestFailed
from fwk_kit.cli import chat as module
from fwk_kit.cli.chat import Chat, _converse


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

    def read(prompt: str) -> str:
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


def test_lines_of_earlier_sessions_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readline = pytest.importorskip("readline", reason="this Python was built without readline")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with module._line_editing():
        readline.clear_history()
        readline.add_history("said before")
    readline.clear_history()
    assert (tmp_path / "fwk/chat_history").stat().st_mode & 0o77 == 0, "it is nobody else's"
    with module._line_editing():
        assert readline.get_history_item(1) == "said before"
    readline.clear_history()


def test_a_conversation_without_an_answer_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(["one", "fail", EOFError()])

    def read(prompt: str) -> str:
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
