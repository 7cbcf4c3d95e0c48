"""``fwk``: its commands, each of which imports only what it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def usage() -> str:
    from fwk.cli.commands import commands, overview  # noqa: PLC0415 - see ``main``

    return overview(
        "fwk",
        "An LLM inference framework whose every feature is a plugin.",
        commands(),
        "'fwk COMMAND --help' explains a command. 'fwk serve' alone serves a small real chat model.",
    )


def version(argv: Sequence[str]) -> int:
    """Print the version."""
    from fwk import __version__  # noqa: PLC0415

    print(__version__)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Errors meant for a person are one line and the exit code of their kind (``fwk.errors``).

    Imports within, so that Ctrl-C during them ends without a traceback, too.
    """
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(words: list[str]) -> int:
    from fwk.cli.commands import OWN, commands, run  # noqa: PLC0415
    from fwk.errors import FwkError  # noqa: PLC0415

    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    if words[0] in ("-V", "--version"):
        words = ["version"]
    try:
        found = OWN if words[0] in OWN else commands()  # those of other packages are not imported for one of core's
        return run(words[0], found, words[1:])
    except FwkError as error:
        print(f"fwk: error: {error}", file=sys.stderr)
        return error.exit_code
