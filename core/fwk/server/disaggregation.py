"""Where prefill and decode are in different servers: the routes of the one, and the way there of the other."""

from __future__ import annotations

from fwk.config import EngineOptions
from fwk.config.secrets import read_secret
from fwk.server.frontend import ServerFrontend
from fwk.server.prefill_routes import PrefillRoutes
from fwk.server.remote_prefill import RemotePrefill
from fwk.server.replicas import Replicas
from fwk.server.route_registry import RouteRegistry


def share_work(options: EngineOptions, frontend: ServerFrontend, engines: Replicas, routes: RouteRegistry) -> None:
    """Have a server compute prompts for others, or have its own computed, if its options say so."""
    if options.disaggregation_mode == "null":
        return
    secret = read_secret(options.disaggregation_token_file or "", "--disaggregation-token-file")
    if options.disaggregation_mode == "prefill":
        prefill = PrefillRoutes(engines, secret, options.page_size, frontend.card.vocab_size)
        routes.register("disaggregation", prefill.routes, public=prefill.paths)
        return

    async def ours() -> list[dict[str, str]]:
        return (await engines.call_workers("kv_common"))[0]

    frontend.remote_prefill = RemotePrefill(options, secret, ours)
