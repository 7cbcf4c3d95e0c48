"""The worker's side of K/V that moves between servers: a transport over its KV cache, and what the engine calls."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fwk.config import Config
from fwk.config.secrets import read_secret
from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionLayer
from fwk.interfaces.kv_transfer import KVTransfer, KVTransferContext
from fwk.interfaces.parallel import ParallelGroup
from fwk.plugins.selection import choose
from fwk.setup.resolve import ModelSetup
from fwk.worker.identity import kv_common
from fwk.worker.model_hash import ModelHash


class KVExchange:
    """Passes the engine's orders on to a transport. Deadlines are seconds from now: clocks differ between machines."""

    def __init__(self, transport: KVTransfer, common: dict[str, str], rank: int, *, is_prefill: bool) -> None:
        self._transport = transport
        self._common = common
        self._rank = rank
        self._address = transport.address() if is_prefill else b""

    def operations(self) -> dict[str, Callable[..., Any]]:
        """What the engine calls, by name."""
        return {
            "kv_common": lambda: self._common,
            "kv_address": lambda: self._address,
            "kv_offer": self.offer,
            "kv_withdraw": self._transport.withdraw,
            "kv_receive": self.receive,
            "kv_cancel": self._transport.cancel,
            "kv_poll": self.poll,
        }

    def offer(self, key: str, block_ids: Sequence[int], seconds: float) -> None:
        self._transport.offer(key, block_ids, time.monotonic() + seconds)

    def receive(
        self, addresses: Sequence[bytes], key: str, places: Sequence[int], block_ids: Sequence[int], seconds: float
    ) -> None:
        self._transport.receive(addresses[self._rank], key, places, block_ids, time.monotonic() + seconds)

    def poll(self) -> list[tuple[str, bool, int, float, str]]:
        """Key, whether it is whole, bytes, seconds and error of each transfer that has ended."""
        return [(t.key, t.is_whole, t.num_bytes, t.seconds, t.error) for t in self._transport.poll()]

    def close(self) -> None:
        self._transport.close()


def open_exchange(
    config: Config,
    setup: ModelSetup,
    chosen: dict[str, str],
    layers: list[AttentionLayer],
    tp: ParallelGroup,
    files: ModelHash,
) -> KVExchange | None:
    """The transport of a worker whose KV cache is allocated, where prefill and decode are in different servers.

    Raises ``ConfigError`` when it cannot work, ``PluginError`` when none can be had; names it in ``chosen``.
    """
    options = config.engine
    if options.disaggregation_mode == "null":
        return None
    plugins = setup.factory.plugins
    item = choose(plugins, "kv_transfer", options.disaggregation_transfer_backend, setup.facts).chosen
    assert item is not None, "choose raises when nothing is possible"
    chosen["kv_transfer"] = item.name
    caches = [layer.kv_cache for layer in layers if layer.kv_cache is not None]
    if not caches:
        raise ConfigError(f"--disaggregation-mode {options.disaggregation_mode}: {setup.opened.name} keeps no K/V")
    common = kv_common(config, plugins, setup, chosen, layers, tp, files.result())
    context = partial(
        KVTransferContext,
        kv_caches=caches,
        block_size=options.page_size,
        identity=hashlib.blake2b(json.dumps([common, tp.rank], sort_keys=True).encode(), digest_size=32).digest(),
        secret=read_secret(options.disaggregation_token_file or "", "--disaggregation-token-file"),
        rank=tp.rank,
    )
    transport = setup.factory.build(item, context)
    return KVExchange(transport, common, tp.rank, is_prefill=options.disaggregation_mode == "prefill")
