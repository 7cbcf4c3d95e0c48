"""``fwk``: serve, generate, chat, plugins. Each command imports only what it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from fwk.errors import FwkError

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("fwk.cli.serve:run", "serve a model over HTTP"),
    "generate": ("fwk.cli.generate:run", "complete a prompt and exit"),
    "chat": ("fwk.cli.chat:run", "talk to a model in the terminal"),
    "plugins": ("fwk.cli.plugins:run", "list, judge, test, compare and begin plugins"),
    "bench": ("fwk.cli.bench:run", "measure servers, the engine, start-up, this machine"),
    "arguments": ("fwk.cli.arguments:run", "print the page of all arguments (docs/arguments.md)"),
    "limits": ("fwk.cli.limits:run", "print the page of all limits of requests (docs/limits.md)"),
    "version": ("fwk.cli.main:version", "print the version"),
}


def usage() -> str:
    lines = [f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    return (
        "usage: fwk COMMAND [options]\n\nAn LLM inference framework whose every feature is a plugin.\n\ncommands:\n"
        + "\n".join(lines)
        + "\n\n'fwk COMMAND --help' explains a command. 'fwk serve' alone serves a small real chat model.\n"
    )


def version(argv: Sequence[str]) -> int:
    """Print the version."""
    from fwk import __version__  # noqa: PLC0415

    print(__version__)
    return 0


def load(name: str) -> Callable[[Sequence[str]], int]:
    """Import a command."""
    import importlib  # noqa: PLC0415

    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Errors meant for a person are one line and the exit code of their kind (``fwk.errors``)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    if words[0] in ("-V", "--version"):
        words = ["version"]
    if words[0] not in COMMANDS:
        print(f"fwk: error: unknown command {words[0]!r}; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return load(words[0])(words[1:])
    except FwkError as error:
        print(f"fwk: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
