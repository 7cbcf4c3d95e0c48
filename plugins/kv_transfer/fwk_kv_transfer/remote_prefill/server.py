"""The server's part: the routes of a server that computes prompts, or the way there of one that decodes."""

from __future__ import annotations

from fwk.interfaces.feature import ServerPart, ServerPartContext
from fwk_kv_transfer.remote_prefill import RemotePrefillOptions


class SharedWork(ServerPart):
    """A prefill server has ``PrefillRoutes``, a decode server ``RemotePrefill``."""

    def __new__(cls, context: ServerPartContext) -> SharedWork:
        from fwk_kv_transfer.remote_prefill.prefill_routes import PrefillRoutes  # noqa: PLC0415 - they derive from it
        from fwk_kv_transfer.remote_prefill.prefill_servers import RemotePrefill  # noqa: PLC0415

        options: RemotePrefillOptions = context.options
        return object.__new__(PrefillRoutes if options.disaggregation_mode == "prefill" else RemotePrefill)
