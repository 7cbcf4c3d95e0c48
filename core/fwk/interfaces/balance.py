"""Which of several engines serves a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fwk.interfaces.declaration import Declaration
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.types import EngineStats, Request


@dataclass(slots=True)
class Replica:
    """One engine, as the server sees it.

    num_open: sequences sent to it whose requests have not ended; counted by the server, and so never late.
    stats: what it last reported: with every step that has news, and twice a second.

    - ``index``: its number among the server's engines, from 0.
    """

    index: int
    num_open: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


@dataclass(frozen=True, slots=True)
class BalanceContext:
    """What a load balancer is built with.

    - ``num_replicas``: engines of the server.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``lifecycle``: for calls of its own at setup, ready, drain and close, and for work in the background.
    """

    num_replicas: int
    options: Any = None
    lifecycle: PluginLifecycle = field(default_factory=PluginLifecycle)


class LoadBalancer(ABC):
    """Asked once a request, on the event loop's thread: answer at once.

    One that raises, or chooses what was not offered, is asked no more: the engine with the fewest open requests gets
    each.
    """

    def __init__(self, context: BalanceContext) -> None:
        self.context = context

    @abstractmethod
    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        """One of ``replicas``: those that can serve now, by index; there is at least one."""

    def ended(self, request: Request, replica: Replica) -> None:
        """A request that was to go to a replica has ended there, was not accepted, or goes to another one."""

    def info(self, replica: Replica) -> dict[str, Any]:
        """What /server_info is to tell of a replica, as JSON."""
        return {}


@dataclass(frozen=True, kw_only=True)
class LoadBalancerSpec(Declaration):
    """Declares a load balancer."""

    family: ClassVar[str] = "load_balancers"
