"""File descriptors: every connection takes one, and many systems allow a process 1,024 unless it asks for more."""

from __future__ import annotations

import contextlib

ENOUGH = 65_536


def allow_more_descriptors() -> None:
    """Raise the soft limit of open files to the hard one, up to ``ENOUGH``; children inherit it."""
    with contextlib.suppress(ImportError):  # not on every platform
        import resource  # noqa: PLC0415

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with contextlib.suppress(OSError, ValueError):  # refused: then connections are fewer, as before
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
