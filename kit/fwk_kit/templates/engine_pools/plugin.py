"""The pool below, which a client's requests reach while it has few of them under way."""

from __future__ import annotations

from collections import Counter

from fwk.errors import NotServed
from fwk.interfaces.engine_pool import EnginePool, EnginePoolContext, Receiver
from fwk.types import Request


class MinePool(EnginePool):
    """What it does not override, the pool below does."""

    def __init__(self, context: EnginePoolContext) -> None:
        super().__init__(context)
        self._limit = context.options.mine_requests_each
        self._tenants: dict[str, str] = {}  # of open requests
        self._counts: Counter[str] = Counter()

    def submit(self, request: Request, receiver: Receiver) -> None:
        tenant = request.service.tenant
        if self._counts[tenant] >= self._limit:
            raise NotServed(f"{self._limit} requests of this key are under way already; try again", 429, 1)
        super().submit(request, receiver)
        self._tenants[request.request_id] = tenant
        self._counts[tenant] += 1

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        tenant = self._tenants.pop(request_id, None)
        if tenant is not None:
            self._counts[tenant] -= 1
