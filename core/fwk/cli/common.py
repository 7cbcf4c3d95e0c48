"""What the commands that run a model have in common: plugins, options, log."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from fwk.cli.option_parsing import (
    HelpAll,
    Parser,
    add_option_flags,
    parse,
    read_config_file,
    read_environment,
    without_negations,
)
from fwk.config import Config
from fwk.errors import ConfigError
from fwk.plugins import PluginSet, build_config, discover
from fwk.plugins.options import called
from fwk_peers.arguments import foreign
from fwk_peers.arguments import note as note_on
from fwk_process.kernel_caches import bound_kernel_caches
from fwk_process.threads import configure_omp_env


def warn(sentence: str) -> None:
    """One line to the user."""
    print(f"fwk: warning: {sentence}", file=sys.stderr)


def note(sentence: str) -> None:
    """One line of progress to the user."""
    print(sentence, file=sys.stderr, flush=True)


def read_options(parser: Parser, argv: Sequence[str]) -> tuple[PluginSet, Config, Any]:
    """Discover plugins, read flags, ``--config`` and ``FWK_*`` variables (the first wins), build the configuration.

    What the command's own arguments are comes back in the namespace.
    """
    plugins, given, namespace = read_given(parser, argv)
    return plugins, build_config(plugins, given, note), namespace


def read_given(parser: Parser, argv: Sequence[str]) -> tuple[PluginSet, dict[str, Any], Any]:
    """The same, but the options as they were given.

    The parser may hold the command's own arguments; they come back in the namespace. One of them, ``bare_model``, is
    the model given without a flag.
    """
    configure_omp_env(os.environ)  # before torch is imported
    bound_kernel_caches(os.environ)
    plugins = discover(_early(argv), warn=warn)
    parser.own = frozenset(action.dest for action in parser._actions)
    parser.add_argument("--help-all", action=HelpAll, default=argparse.SUPPRESS, help="show every option and exit")
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line wins")
    add_option_flags(parser, plugins)
    return plugins, *given_options(parser, plugins, argv)


def given_options(parser: Parser, plugins: PluginSet, argv: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """``read_given`` with a parser that has all flags; without the plugins."""
    namespace, unknown, others = parse(parser, argv)
    file = getattr(namespace, "config", None) or os.environ.get("FWK_CONFIG")
    given = without_negations(parser, read_config_file(file)) if file else {}
    line = {name: value for name, value in vars(namespace).items() if name not in parser.own | {"config"}}
    # Let the one place that knows every option say what is wrong with the first that is none.
    wrong = {name: value for name, value in others.items() if note_on(name, value) is None}
    wrong |= {word.partition("=")[0]: "true" for word in unknown[:1] if word.startswith("-")}
    if wrong:
        build_config(plugins, {**wrong, **given, **line})
    bare = getattr(namespace, "bare_model", None)
    if bare is not None and line.setdefault("model", bare) != bare:
        raise ConfigError(f"two models are given: {bare} and --model {line['model']}")
    if unknown:
        parser.error(f"unexpected argument {unknown[0]!r}")
    given |= line | others
    names = called(plugins)
    taken = {names.get(name, name).partition(" ")[0] for name in given}
    for name, value in read_environment(parser, os.environ).items():
        if (name in names or foreign(name)) and names.get(name, name).partition(" ")[0] not in taken:
            given[name] = value
    return given, namespace


def _early(argv: Sequence[str]) -> list[str]:
    """--allow-override must be known before plugins are discovered."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--allow-override", nargs="+", default=[])
    words = [word.replace("_", "-", 1) if word.startswith("--allow_") else word for word in argv]
    return parser.parse_known_args(words)[0].allow_override
