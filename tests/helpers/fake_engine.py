"""Moved to ``fwk.testing.fake_engine``."""

from fwk.testing.fake_engine import *  # noqa: F403
