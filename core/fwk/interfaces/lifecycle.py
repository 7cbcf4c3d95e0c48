"""A plugin's part in the server's life: setup, ready, drain, close, and work in the background."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum

Call = Callable[[], Awaitable[None]]


class Stage(Enum):
    """When a plugin's calls come. Each comes once, those of a stage in the order in which they were given.

    - ``SETUP``: before any request is answered. What it raises stops the server's start, in the plugin's name.
    - ``READY``: the engines serve, requests are about to be taken. What it raises stops the server's start, too.
    - ``DRAIN``: no new requests are taken; those under way finish meanwhile. What it raises is logged.
    - ``CLOSE``: nothing is served any more, the plugin's work in the background has ended. What it raises is logged.
    """

    SETUP = "setup"
    READY = "ready"
    DRAIN = "drain"
    CLOSE = "close"


class PluginLifecycle:
    """What a plugin of the API process is given to hang its own calls on; core makes one for each plugin.

    A plugin that wants none of it does nothing. One that is switched on while the server runs lives through setup and
    ready then, one that is switched off through drain and close; all that comes on the server's event loop.

    - ``owner``: what messages call the plugin.
    - ``calls``: what ``on`` was given, by stage.
    - ``work``: what ``background`` was given.
    """

    def __init__(self, owner: str = "a plugin") -> None:
        self.owner = owner
        self.calls: dict[Stage, list[Call]] = {stage: [] for stage in Stage}
        self.work: list[Call] = []

    def on(self, stage: Stage, call: Call) -> None:
        """Await ``call`` in that stage. Drain and close may take a few seconds each, then they are given up."""
        self.calls[stage].append(call)

    def background(self, work: Call) -> None:
        """Run ``work`` from the end of setup on. It is cancelled, and awaited, before close.

        An exception that ends it is logged in the plugin's name; it is not started again.
        """
        self.work.append(work)
