"""Former name of ``fwk.interfaces.prefix_cache``, kept for plugins written for it (docs/plugins/stability.md)."""

from fwk.interfaces.prefix_cache import *  # noqa: F403
