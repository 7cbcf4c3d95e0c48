"""The commands there are: core's own, and those of the entry-point group ``fwk.commands``."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from fwk.cli.formatting import help_formatter
from fwk.errors import ConfigError, PluginError
from fwk.interfaces.command import GROUP, Command

OWN = {
    "serve": Command("serve a model over HTTP", "fwk.cli.serve:run"),
    "plugins": Command("list, judge, test, compare and begin plugins", "fwk.cli.commands:run_plugins"),
    "version": Command("print the version", "fwk.cli.main:version"),
}
"""Core's commands. Another package's command of the same name is refused."""


def commands(prefix: str = "", points: Sequence[EntryPoint] | None = None) -> dict[str, Command]:
    """The commands by name: core's first, then those of other packages. One that cannot be loaded says so when it runs.

    prefix: ``"plugins."`` for the commands below ``fwk plugins``.
    points: instead of those that are installed.
    """
    found = {} if prefix else dict(OWN)
    for point in sorted(entry_points(group=GROUP) if points is None else points, key=lambda point: point.name):
        name = point.name.removeprefix(prefix)
        if point.name.startswith(prefix) and "." not in name:
            command = _loaded(point)
            if name in found:
                command = _failing(f"command {point.name!r} of {_package(point)}: another package has that name too")
            found[name] = command
    return found


def run(name: str, found: Mapping[str, Command], words: Sequence[str], what: str = "command") -> int:
    """Run a command. Raises ``ConfigError`` for an unknown one, ``PluginError`` for one that failed to load."""
    if name not in found:
        near = difflib.get_close_matches(name, found, 1)
        meant = f": did you mean {near[0]!r}?" if near else f"; commands: {', '.join(found)}"
        raise ConfigError(f"unknown {what} {name!r}{meant}")
    command = found[name]
    if not command.load:
        raise PluginError(command.summary)
    return command.function()(words)


def run_plugins(words: Sequence[str]) -> int:
    """``fwk plugins``: run the command below it that the first word names."""
    found = commands("plugins.")
    if not words or words[0] in ("-h", "--help", "help"):
        about = "Look at the installed plugins, prove them, begin new ones."
        print(overview("fwk plugins", about, found, "'fwk plugins COMMAND --help' explains a command."), end="")
        return 0 if words else 2
    from fwk.plugins import FAMILIES  # noqa: PLC0415 - here alone: other commands start without it

    if not difflib.get_close_matches(words[0], found, 1) and (near := difflib.get_close_matches(words[0], FAMILIES, 1)):
        raise ConfigError(f"unknown command of fwk plugins {words[0]!r}: did you mean 'why {near[0]}'?")
    return run(words[0], found, words[1:], "command of fwk plugins")


def overview(name: str, about: str, found: Mapping[str, Command], end: str) -> str:
    """Help that lists commands, a line for each."""
    formatter = help_formatter()(name, max_help_position=24)
    formatter.add_usage("%(prog)s COMMAND [options]", [], [])
    formatter.add_text(about)
    formatter.start_section("commands")
    for word, command in found.items():
        if command.is_listed:
            formatter.add_argument(argparse.Action([], word, help=command.summary.replace("%", "%%")))
    formatter.end_section()
    formatter.add_text(end)
    return formatter.format_help()


def _loaded(point: EntryPoint) -> Command:
    try:
        command = point.load()
    except Exception as error:
        return _failing(f"command {point.name!r} of {_package(point)} ({point.value}) failed to import: {error}")
    if not isinstance(command, Command):
        return _failing(f"command {point.name!r} of {_package(point)}: {point.value} is not a Command")
    return command


def _failing(sentence: str) -> Command:
    return Command(sentence, "")


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
