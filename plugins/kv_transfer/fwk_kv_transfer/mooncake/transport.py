"""Blocks of the KV cache by Mooncake's transfer engine."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

from fwk.errors import ConfigError, PluginError
from fwk.interfaces.kv_transfer import KVTransferContext
from fwk_kv_transfer._common.memory import MemoryTransfer, Reads
from fwk_kv_transfer._common.wire import WireError


class MooncakeTransfer(MemoryTransfer):
    """One engine in each worker. Its peers are found by its own handshake (``P2PHANDSHAKE``): no metadata server."""

    transport = "mooncake"

    def __init__(self, context: KVTransferContext) -> None:
        super().__init__(context)
        self._registering = threading.Lock()
        host, device = context.options.disaggregation_transfer_host, context.options.disaggregation_ib_device
        self._host = host
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it tells of each connection otherwise, on stderr
        self._engine: Any = _imported().TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "rdma" if device else "tcp", device):
            raise ConfigError(
                f"Mooncake cannot start at {host} (--disaggregation-transfer-host, --disaggregation-ib-device "
                f"{device or 'not given'}): its own lines above say why"
            )

    def expose(self, regions: list[tuple[int, int]]) -> bytes:
        for address, size in regions:
            self.register(address, size)
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def register(self, address: int, size: int) -> None:
        with self._registering:
            if self._engine.register_memory(address, size):
                raise PluginError(f"kv_transfer.mooncake: Mooncake cannot register {size} bytes of memory")

    def read(self, source: bytes, reads: Reads, is_stopped: Callable[[], bool]) -> None:
        """Waits for Mooncake, half a minute for a process that was stopped, and a minute for one that never answered.

        Its call that does not wait says that a batch is read when the first of its regions is (0.3.13).
        """
        if self._engine.batch_transfer_sync_read(source.decode(), reads.local, reads.remote, reads.sizes):
            raise WireError(f"Mooncake could not read the other side's memory at {source.decode()}")


def _imported() -> Any:
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise PluginError(
            f"kv_transfer.mooncake: Mooncake is installed and cannot be loaded ({error}): it needs the system's "
            "libibverbs and libnl (apt-get install libibverbs1 libnl-3-200 libnl-route-3-200)"
        ) from None
