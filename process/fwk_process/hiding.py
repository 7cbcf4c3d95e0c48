"""Keeping secrets out of the log."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

HIDDEN = "(hidden)"

SHORT = 4
"""A secret of fewer characters is hidden where it stands alone, else ``a`` would be cut out of every word."""


class HidingFormatter(logging.Formatter):
    """Formats records as told, and hides the given texts wherever they come up: arguments, tracebacks, all of it."""

    def __init__(self, form: str, secrets: Iterable[str | None]) -> None:
        super().__init__(form)
        self._secrets = [secret for secret in secrets if secret]

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record), self._secrets)


def hide(text: str, secrets: Iterable[str]) -> str:
    """The text without the given secrets; of short ones, as a part of a word, nobody learns more than of any word."""
    for secret in secrets:
        if len(secret) >= SHORT:
            text = text.replace(secret, HIDDEN)
        else:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return text
