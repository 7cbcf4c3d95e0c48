"""How help looks: in colours where they can be had."""

from __future__ import annotations

import argparse
import os
import sys


def help_formatter() -> type[argparse.HelpFormatter]:
    """The class that lays out help: in colours with ``rich-argparse`` where standard output is a terminal.

    Without the package, with ``NO_COLOR`` set, or into a file or a pipe, it is argparse's own.
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return argparse.HelpFormatter
    try:
        from rich_argparse import RichHelpFormatter  # noqa: PLC0415 - optional, and only for help
    except ImportError:
        return argparse.HelpFormatter

    class Coloured(RichHelpFormatter):
        """Texts are shown as they are: brackets in them are no markup."""

        text_markup = help_markup = False
        group_name_formatter = str

    return Coloured
