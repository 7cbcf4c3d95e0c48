"""Moved to ``fwk.testing.batches``."""

from fwk.testing.batches import *  # noqa: F403
