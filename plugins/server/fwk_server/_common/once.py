"""Lines of the log that are said once, however many requests give cause."""

from __future__ import annotations

import logging

MAX_SAID = 256
"""Names are the clients' to choose: past so many, nothing more is said."""

MAX_NAME = 256
"""Characters of a name that is kept."""

logger = logging.getLogger(__name__)


class Once:
    """Says a line for each name, the first time."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, name: str, line: str) -> None:
        """Say it, unless something was said of ``name``."""
        name = name[:MAX_NAME]
        if name not in self._said and len(self._said) < MAX_SAID:
            self._said.add(name)
            logger.warning("%s", line)
