"""``fwk chat``: a terminal chat with a running server, or with a model loaded here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fwk.cli.common import note, read_options
from fwk.cli.option_parsing import Parser
from fwk.errors import FwkError
from fwk.types import SamplingParams
from fwk_kit.cli.output import check_output
from fwk_kit.cli.remote_chat import reach, remote
from fwk_process.log import set_up_log

Messages = list[dict[str, str]]
Sampling = dict[str, Any]
Answer = Callable[[Messages, Sampling], Iterator[str]]

WITHOUT_ADVICE = {"temperature": 0.7, "top_p": 0.95}
"""Sampling for a model loaded here whose makers recommend none; a server has its own."""

NUMBERS: dict[str, type[int] | type[float]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "max_tokens": int, "seed": int,
}  # fmt: skip

HELP = """commands:
  /help             this
  /clear            forget the conversation
  /system TEXT      set a system message (none: without), and begin anew
  /set NAME VALUE   set temperature, top_p, top_k, min_p, max_tokens or seed (no VALUE: the default again)
  /show             show the settings and the conversation's length
  /retry            answer the last message again
  /undo             take the last message and its answer back
  /save FILE        write the conversation as JSON
  /exit             leave, as Ctrl-D does
A line that ends with \\ continues in the next, as after Alt-Enter. Ctrl-C cuts an answer short."""


class Writer(Protocol):
    """Shows one answer."""

    def write(self, piece: str) -> None:
        """The answer continues with ``piece``."""

    def close(self) -> None:
        """The answer is over."""


class PlainWriter:
    """Gives an answer out as it is, to a file or another program."""

    def write(self, piece: str) -> None:
        print(piece, end="", flush=True)

    def close(self) -> None:
        print()


def run(argv: Sequence[str]) -> int:
    """Talk until the input ends."""
    parser = Parser("fwk chat", description="Talk to a model in the terminal.", allow_abbrev=False)
    parser.add_argument("bare_model", nargs="?", default=None, metavar="MODEL", help="folder, file, hub id or name")
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8000; else a model is loaded here")
    parser.add_argument("--key", help="API key of that server")
    parser.add_argument("--system", help="system message")
    group = parser.add_argument_group("sampling")
    for name, kind in NUMBERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help="default: what the model's makers recommend")
    if any(word == "--url" or word.startswith("--url=") for word in argv):
        arguments = parser.parse_args(argv)
        answer = remote(arguments.url, arguments.key, arguments.bare_model)
        try:
            reach(arguments.url)
        except FwkError as error:
            note(f"error: {error}")
            return 1
        return _converse(Chat(answer, arguments.system, _given(arguments)))
    plugins, config, arguments = read_options(parser, argv)
    set_up_log("warning")
    from fwk import LLM  # noqa: PLC0415 - torch comes with it

    with LLM.from_config(config, plugins, note) as llm:
        advice = llm.default_sampling or WITHOUT_ADVICE

        def answer_here(messages: Messages, sampling: Sampling) -> Iterator[str]:
            yield from llm.stream(llm.text.chat_ids(messages), SamplingParams(**{**advice, **sampling}))

        return _converse(Chat(answer_here, arguments.system, _given(arguments)))


def _given(arguments: Any) -> Sampling:
    return {name: value for name in NUMBERS if (value := getattr(arguments, name)) is not None}


@dataclass(slots=True)
class Chat:
    """A conversation and its settings."""

    answer: Answer
    system: str | None = None
    sampling: Sampling = field(default_factory=dict[str, Any])
    messages: Messages = field(default_factory=list[dict[str, str]])
    has_failed: bool = False  # the last message had no answer
    writer: Callable[[], Writer] = PlainWriter

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str) -> None:
        """Send a message and print the answer; an error takes the message back."""
        self.messages.append({"role": "user", "content": text})
        reply, self.has_failed = "", False
        writer = self.writer()
        try:
            for piece in self.answer(self.messages, self.sampling):
                reply += piece
                writer.write(piece)
        except KeyboardInterrupt:
            pass
        except FwkError as error:
            self.messages.pop()
            self.has_failed = True
            note(f"error: {error}")
            return
        finally:
            writer.close()
        self.messages.append({"role": "assistant", "content": reply})

    def command(self, line: str) -> bool:
        """Carry out a command; returns whether to continue."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/exit" | "/quit":
                return False
            case "/clear":
                self.clear()
            case "/system":
                self.system = rest or None
                self.clear()
            case "/set":
                self._set(rest)
            case "/show":
                settings = " ".join(f"{one}={value}" for one, value in self.sampling.items())
                note(
                    f"{len(self.messages)} messages; system: {self.system or 'none'}; {settings or 'default sampling'}"
                )
            case "/retry" | "/undo":
                text = self._undo()
                if text is None:
                    note("there is no message yet")
                elif name == "/retry":
                    self.say(text)
            case "/save":
                self._save(rest)
            case _:
                note(HELP)
        return True

    def _set(self, rest: str) -> None:
        name, _, value = rest.replace("=", " ").partition(" ")
        name = name.replace("-", "_")
        if name not in NUMBERS:
            note(f"/set NAME VALUE, where NAME is one of {', '.join(NUMBERS)}")
            return
        self.sampling.pop(name, None)
        if value.strip():
            try:
                self.sampling[name] = NUMBERS[name](value)
            except ValueError:
                note(f"{name} must be a number, not {value.strip()!r}")

    def _undo(self) -> str | None:
        """Take the last exchange back; returns what was said."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                text = self.messages[index]["content"]
                del self.messages[index:]
                return text
        return None

    def _save(self, name: str) -> None:
        if not name:
            note("/save FILE")
            return
        try:
            check_output(path := Path(name).expanduser())
            path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            note(f"error: {name}: {error.strerror}")


def _converse(chat: Chat) -> int:
    """The dialogue itself: the exit code, 1 where the last message had no answer."""
    read = _read
    if sys.stdin.isatty() and sys.stdout.isatty():
        from fwk_kit.cli import terminal  # noqa: PLC0415 - only a person needs it

        commands = re.findall(r"^  (/\w+)", HELP, re.MULTILINE)
        read = terminal.reader({name: tuple(NUMBERS) if name == "/set" else () for name in commands})
        chat.writer = terminal.MarkdownWriter
        note("/help lists the commands")
    while (text := read()) is not None:
        if text.startswith("/"):
            if not chat.command(text):
                break
        elif text:
            chat.say(text)
    return int(chat.has_failed)


def _read() -> str | None:
    """A message, of several lines where they end with a backslash; None at the end."""
    lines: list[str] = []
    while True:
        try:
            line = input()
        except EOFError:
            return "\n".join(lines).strip() if lines else None
        except KeyboardInterrupt:
            print()
            return ""
        if not line.endswith("\\"):
            return "\n".join([*lines, line]).strip()
        lines.append(line[:-1])
