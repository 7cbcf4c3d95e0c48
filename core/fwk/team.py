"""Former name of ``fwk.native.thread_pool``, kept for plugins written for it (docs/plugins/stability.md)."""

from fwk.native.thread_pool import Tape, operator
from fwk.native.thread_pool import ThreadPool as ThreadPool

__all__ = ["Tape", "ThreadPool", "operator"]
