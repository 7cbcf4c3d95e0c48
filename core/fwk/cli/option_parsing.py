"""Flags made from options models, and the reading of ``--config`` files."""

from __future__ import annotations

import argparse
import copy
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from fwk.cli.formatting import help_formatter
from fwk.config import aliases_of, is_secret, stability_of, turned_by
from fwk.errors import ConfigError
from fwk.plugins import PluginSet, option_owners
from fwk.plugins.options import flag, normal, switches
from fwk_files.regular import read_text
from fwk_peers.arguments import FALSE, TRUE, Argument, foreign

ESSENTIAL = (
    "served_model_name", "dtype", "quantization", "context_length", "tensor_parallel_size", "attention_backend",
    "speculative_algorithm", "enable_lora", "mem_fraction_static", "host", "port", "api_key", "config",
)  # fmt: skip
"""Options that the short help shows."""

MAX_NAME = 30
"""Characters of a flag with its value in the short help; what it does then begins a line of its own."""

_NEITHER = {"none", "null"}  # no model is called so
_SHORT, _FLAG = re.compile(r"-[a-zA-Z][a-zA-Z-]*\d?"), re.compile("-($|-|[a-zA-Z])")

PREFIX = "FWK_"
"""Of variables that give options."""


class Parser(argparse.ArgumentParser):
    """argparse with our manner of complaint: one line, exit code 2, no usage dump.

    ``own``: the command's arguments, by dest, once it has options too; then ``--help`` is short: those, and what most
    people need.
    """

    own: frozenset[str] = frozenset()
    shows_all = False

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def option_of(self, name: str) -> argparse.Action | None:
        """What a flag gives a value to."""
        return self._option_string_actions.get(name)

    def format_help(self) -> str:
        """The whole help, or the short one."""
        self.formatter_class = help_formatter()
        if not self.own or self.shows_all:
            return super().format_help()
        actions = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        groups = [
            ("arguments", [_short(action) for action in actions if action.dest in self.own]),
            ("options that many need", [_short(action) for action in actions if action.dest in ESSENTIAL]),
        ]
        formatter = self.formatter_class(self.prog, max_help_position=MAX_NAME)
        formatter.add_usage("%(prog)s [options]", [], [])
        formatter.add_text(self.description)
        for title, group in groups:
            formatter.start_section(title)
            formatter.add_arguments(group)
            formatter.end_section()
        count = sum(bool(action.option_strings) for action in actions)
        formatter.add_text(
            f"All {count} options: {self.prog} --help-all. {PREFIX}PORT=80 in the environment is --port 80, and so on."
        )
        return formatter.format_help()


class HelpAll(argparse.Action):
    """Prints every option."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        parser.shows_all = True
        parser.print_help()
        parser.exit()


def _short(action: argparse.Action) -> argparse.Action:
    """The same with one name, and what the first sentence says."""
    short = copy.copy(action)
    short.option_strings = [name for name in action.option_strings if name.startswith("--")][:1]
    text = (action.help or "").replace("%%", "%")
    first = text.partition(" [")[0].partition(". ")[0].partition(" (")[0].rstrip(".")
    first = textwrap.shorten(first, 110, placeholder=" ...")
    short.help = first.replace("%", "%%")
    if short.nargs in ("?", "+") and short.option_strings:
        short.nargs = None
    return short


class _Once(argparse.Action):
    """Stores a value, and refuses a second one that says something else: the last would silently win."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, is_secret: bool = False, **settings: Any) -> None:
        super().__init__(option_strings, dest, **settings)
        self._is_secret = is_secret

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        before = getattr(namespace, self.dest, values)
        if before != values:
            which = "with different values" if self._is_secret else f"{_shown(before)} and {_shown(values)}"
            parser.error(f"{option_string} is given twice: {which}")
        setattr(namespace, self.dest, values)


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def add_option_flags(parser: argparse.ArgumentParser, plugins: PluginSet) -> None:
    """A flag for every option, in a group for each owner. A flag that was not given leaves no trace."""
    seen: set[str] = set()
    turns = switches(plugins)
    for owner in option_owners(plugins):
        group = parser.add_argument_group(owner.title)
        for name, field in owner.model.model_fields.items():
            if name in seen:
                continue
            seen.add(name)
            _add(group, name, field, [*turned_by(field), *turns.get(name, {})])


def _add(group: Any, name: str, field: FieldInfo, turns: Sequence[str]) -> None:
    names = [flag(name), *(flag(normal(alias)) for alias in aliases_of(field))]
    settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text(field), "action": _Once}
    settings["is_secret"] = is_secret(field)
    if field.annotation is bool:
        settings |= {"nargs": "?", "const": "true", "metavar": "true|false"}
    elif get_origin(field.annotation) in (tuple, list):
        settings |= {"nargs": "+", "metavar": "NAME"}
    else:
        settings |= {
            "metavar": type_name(field.annotation).upper()
            if get_origin(field.annotation) is not Literal
            else type_name(field.annotation)
        }
    group.add_argument(*names, **settings)
    for turn in turns:
        group.add_argument(
            flag(normal(turn)),
            dest=normal(turn),
            action=_Once,
            nargs="?",
            const="true",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def help_text(field: FieldInfo) -> str:
    """Description, default and stability of an option."""
    parts = [field.description or ""]
    if field.default not in (None, (), False):
        parts.append(f"(default: {field.default})")
    parts.append(f"[{stability_of(field)}]")
    return " ".join(parts).replace("%", "%%")


def type_name(annotation: Any) -> str:
    """A short name of an option's type, for help and documentation."""
    origin = get_origin(annotation)
    if origin is Literal:
        return "|".join(str(value) for value in get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return "|".join(type_name(arg) for arg in get_args(annotation) if arg is not type(None))
    if origin in (tuple, list):
        return f"{type_name(get_args(annotation)[0])}..."
    return getattr(annotation, "__name__", str(annotation))


def parse(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], dict[str, str]]:
    """Parse, taking underscores in flags for dashes; returns what was not understood too, and other servers' arguments.

    A switch takes the next word only if that says true or false, or nothing: what follows it is else the model.
    """
    words: list[str] = []
    others: dict[str, str] = {}
    left = list(argv)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if _SHORT.fullmatch(name) and (parser.option_of(f"-{name}") or foreign(f"-{name}")):
            name = f"-{name}"  # vLLM's -tp is --tp
        if not name.startswith("--"):
            words.append(name + equals + value)
            continue
        name = name.replace("_", "-")
        opposite = _positive(parser, name, value if equals else "true")
        if opposite is not None:
            (name, value), equals = opposite, "="
        other, is_switch = _known(parser, name)
        word = left[0] if left and not equals else "-"
        if word.lower() in TRUE | FALSE | _NEITHER if is_switch else other and not _FLAG.match(word):
            equals, value = "=", left.pop(0)
        equals, value = ("=", "true") if is_switch and not equals else (equals, value)
        if other is not None:
            others[name] = value
        else:
            words.append(name + equals + value)
    return (*parser.parse_known_args(words), others)


def _known(parser: Parser, name: str) -> tuple[Argument | None, bool]:
    """Another server's argument that is no option here, and whether the name is a switch's, here or there."""
    action, other = parser.option_of(name), foreign(name)
    return (None, action.nargs == "?") if action is not None else (other, other is not None and other.is_switch)


def _positive(parser: Parser, name: str, value: Any) -> tuple[str, str] | None:
    """The switch, and its word, of which ``name`` is the opposite: vLLM's --no-enable-lora is --enable-lora false."""
    opposite, word = name.replace("--no-", "--", 1), str(value).lower()
    if opposite == name or word not in TRUE | FALSE or any(_known(parser, name)) or not _known(parser, opposite)[1]:
        return None
    return opposite, "false" if word in TRUE else "true"


def without_negations(parser: Parser, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a file or of variables, by normal names, each switch without its ``no_``."""
    pairs = [(_positive(parser, flag(name), value), name, value) for name, value in given.items()]
    return {normal(turned[0]) if turned else name: turned[1] if turned else value for turned, name, value in pairs}


def read_environment(parser: Parser, environment: Mapping[str, str]) -> dict[str, Any]:
    """Options from variables: ``FWK_PORT`` is ``--port``. Several values are separated by blanks.

    A variable that no option has is left out: the environment is not this program's alone.
    """
    found: dict[str, Any] = {}
    given = {normal(name.removeprefix(PREFIX).lower()): x for name, x in environment.items() if name.startswith(PREFIX)}
    for option, value in without_negations(parser, given).items():
        action = parser.option_of(flag(option))
        if action is not None:
            found[action.dest] = value.split() if action.nargs == "+" else value
        elif option and foreign(option) is not None:
            found[option] = value
    return found


MAX_CONFIG_BYTES = 2**20
"""Of a file of options; YAML is slow to read."""


def read_config_file(path: str) -> dict[str, Any]:
    """Options from a YAML file: a mapping of option names to values. Raises ``ConfigError``."""
    try:
        data = yaml.safe_load(read_text(Path(path).expanduser(), MAX_CONFIG_BYTES))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"--config: {path} is nested too deeply") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config: {path} must hold a mapping of options to values")
    return {normal(str(key)): value for key, value in cast(dict[Any, Any], data).items()}
