"""A decode server's part in requests for which a router has chosen the prefill server."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fwk.interfaces.dialect import GenerateInput
from fwk.interfaces.feature import RequestPart
from fwk_kv_transfer.remote_prefill import Heads, KVSource
from fwk_kv_transfer.remote_prefill.messages import FEATURE_OF_ADAPTERS, Computed, difference
from fwk_kv_transfer.remote_prefill.posting import OrderRefused, PeerError, words_of
from fwk_kv_transfer.remote_prefill.routing import JOIN, Join, Routed, handle_of, prompt_hash, room_key, without_fields

if TYPE_CHECKING:
    from fwk_kv_transfer.remote_prefill.prefill_servers import Peer, RemotePrefill


log = logging.getLogger(__name__)


class RoutedRequest(RequestPart):
    """A request whose prompt a router has sent to a prefill server, too, or before."""

    def __init__(self, remote: RemotePrefill, routed: Routed) -> None:
        self._remote = remote
        self._routed = routed

    async def check(self, item: GenerateInput) -> GenerateInput:
        return without_fields(item)

    async def enter(self, item: GenerateInput) -> KVSource | None:
        """Where the K/V of its prompt are; None: this server computes it."""
        prompt = prompt_hash(item)
        computed: Computed | None = None
        if self._routed.params is not None:
            computed = handle_of(self._remote.secret, self._routed.params, prompt)
        if self.others != (FEATURE_OF_ADAPTERS,) * bool(item.adapter):
            return None  # the other server does not know what they make of its K/V
        if self._routed.room:
            return await self._join(room_key(self._routed.room, prompt))
        if computed is None:
            return None
        common, heads = await self._remote.own()
        why = difference(common, computed.ranks, (heads, computed.heads)) or _other_ranks(heads, computed.heads)
        self._remote.tell_of_router(why and f"a prefill server that a router has chosen cannot serve this one: {why}")
        seconds = self._remote.options.disaggregation_timeout
        return None if why else KVSource(computed.key, seconds, heads, computed.addresses, computed.num_blocks)

    async def _join(self, key: str) -> KVSource | None:
        """Wait until the prefill server of a room has computed the prompt."""
        peer = named_peer(self._remote.peers, self._routed)
        if peer is None:
            where = f"{self._routed.host}:{self._routed.port or ''}"
            self._remote.tell_of_router(
                f"a router sends prompts to the prefill server {where}, which is none of "
                "--disaggregation-prefill-servers or of the --disaggregation-registry: they are computed here, too"
            )
            return None
        self._remote.tell_of_router(None)
        seconds = self._remote.options.disaggregation_timeout
        try:
            async with asyncio.timeout(seconds):
                if not peer.has_agreed:
                    await self._remote.agree(peer)
                _, heads = await self._remote.own()
                computed = await self._remote.ask(peer, JOIN, Join(key, seconds, heads), Computed)
                if computed.key != key:
                    raise PeerError("has answered for another prompt")
                source = await self._remote.read_from(peer, computed)
        except asyncio.CancelledError:  # of a client that has left
            self._remote.withdraw(peer, key)
            raise
        except TimeoutError:
            self._remote.failed(peer, f"has computed no prompt within {seconds:g} seconds")
        except OrderRefused as error:  # it keeps others
            log.debug("the prefill server %s %s", peer.url, error)
        except (PeerError, OSError, EOFError) as error:
            self._remote.failed(peer, words_of(error))
        else:
            self._remote.succeeded(peer)
            return source
        return None


def _other_ranks(ours: Heads, theirs: Heads) -> str | None:
    """Why what a prefill server has written into its reply, before it knew who reads, is not for this server."""
    if ours == theirs:
        return None
    return (
        f"its --tensor-parallel-size is {theirs.num_ranks}, this server's is {ours.num_ranks}, and it has answered "
        "vLLM's router before it knew who reads its K/V: start both with the same, or have decode servers choose"
    )


def named_peer(peers: list[Peer], routed: Routed) -> Peer | None:
    """The prefill server that a router means: of its host and port of workers, else the only one of either, or of all.

    Routers and decode servers may call one machine by different names, and a router need not know of the port.
    """
    at_host = [peer for peer in peers if urlsplit(peer.url).hostname == routed.host.strip("[]").lower()]
    at_port = [peer for peer in peers if routed.port and peer.bootstrap_port == routed.port]
    at_both = [peer for peer in at_host if peer in at_port]
    return next((found[0] for found in (at_both, at_host, at_port, peers) if len(found) == 1), None)
