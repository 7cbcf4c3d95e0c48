"""A person's terminal for ``fwk chat``: lines edited by prompt_toolkit, answers shown as Markdown by rich."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from fwk_files.regular import check_regular

MAX_HISTORY_BYTES = 1_000_000
"""Of earlier sessions' messages; beyond it the older half is dropped."""

REFRESHES_PER_SECOND = 8

# Of a model's answer they would move the cursor, set the title or write to the clipboard.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def reader(commands: Mapping[str, Sequence[str]]) -> Callable[[], str | None]:
    """A function that asks for a message: None at the end of the input, an empty one after Ctrl-C.

    ``commands``: what Tab completes at a message's begin, each with its first words.
    """
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        prompt_continuation=". ",
        key_bindings=keys,
        history=_history(),
        auto_suggest=AutoSuggestFromHistory(),
        completer=CommandCompleter(commands),
        complete_while_typing=False,
    )

    def read() -> str | None:
        try:
            return session.prompt().strip()
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None

    return read


class CommandCompleter(Completer):
    """Completes a command at a message's begin, and the word after it."""

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        command, *words = document.text_before_cursor.split(" ")
        known = self._commands.get(command, ()) if len(words) == 1 else () if words else self._commands
        begun = words[0] if words else command
        return (Completion(name, -len(begun)) for name in known if begun and name.startswith(begun))


def _history() -> History:
    """Messages of earlier sessions, readable by their user alone; a home that cannot be written to costs that alone."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "fwk"
    file = folder / "chat_messages"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        check_regular(file)
        if file.stat().st_size > MAX_HISTORY_BYTES:
            with file.open("rb") as old:
                old.seek(-MAX_HISTORY_BYTES // 2, os.SEEK_END)
                rest = old.read(MAX_HISTORY_BYTES // 2)
            file.write_bytes(rest[rest.find(b"\n# ") + 1 :])
        with file.open("ab"):
            pass
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)


class MarkdownWriter:
    """Shows an answer while it comes: blocks that are complete stay, the one under way is drawn anew."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._text = ""
        self._live = Live(console=self._console, transient=True, refresh_per_second=REFRESHES_PER_SECOND)
        self._live.start()

    def write(self, piece: str) -> None:
        """The answer continues with ``piece``."""
        self._text += _CONTROLS.sub("", piece)
        if "\n" in piece:
            block, self._text = complete_blocks(self._text)
            if block:
                self._console.print(Markdown(block))
        self._live.update(Markdown(self._text))

    def close(self) -> None:
        """The answer is over."""
        self._live.update("")
        with suppress(KeyboardInterrupt):
            self._live.stop()
        if self._text.strip():
            self._console.print(Markdown(self._text))


def complete_blocks(text: str) -> tuple[str, str]:
    """What of a text in Markdown no further text can change, up to an empty line outside of code; and the rest."""
    end, at, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        at += len(line)
        mark = _FENCE.match(line)
        if mark is not None and (not fence or (mark[1].startswith(fence) and not line.strip(" \n" + fence[0]))):
            fence = "" if fence else mark[1]
        elif not fence and line == "\n":
            end = at
    return text[:end], text[end:]
