"""Blocks of the KV cache by NIXL's READ, over UCX."""

from __future__ import annotations

import contextlib
import importlib
import logging
import logging.config
import threading
import time
import uuid
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from fwk.errors import PluginError
from fwk.interfaces.kv_transfer import KVTransferContext
from fwk_kv_transfer._common.memory import MemoryTransfer, Reads
from fwk_kv_transfer._common.wire import WireError

MAX_PEERS = 64
"""Agents of other workers that stay connected; one that is read from again is connected again."""

GRACE_SECONDS = 60.0
"""How long a network may go on writing what was asked of it, after a read was given up."""

PAUSE_MICROSECONDS = 100
"""Of the thread of NIXL's own between two looks at the network."""

MIN_LOOK_SECONDS, MAX_LOOK_SECONDS = 0.0002, 0.002


class NixlTransfer(MemoryTransfer):
    """One agent in each worker; all calls of it are made one at a time, and none of them waits."""

    transport = "nixl"

    def __init__(self, context: KVTransferContext) -> None:
        super().__init__(context)
        self._calls = threading.Lock()
        self._peers: dict[bytes, str] = {}  # by what they told of themselves, the one read from last at the end
        self._num_reads: dict[bytes, int] = {}
        with _own_logging():
            api: Any = _imported()
            try:
                self._agent = _agent(api)
            except Exception as error:
                raise PluginError(f"kv_transfer.nixl: NIXL has no UCX backend here ({error})") from None

    def expose(self, regions: list[tuple[int, int]]) -> bytes:
        with self._calls:
            self._agent.register_memory([(address, size, 0, "") for address, size in regions], "DRAM")
            return self._agent.get_agent_metadata()

    def register(self, address: int, size: int) -> None:
        with self._calls:
            self._agent.register_memory([(address, size, 0, "")], "DRAM")

    def read(self, source: bytes, reads: Reads, is_stopped: Callable[[], bool]) -> None:
        with self._reading(source):
            handle, state = self._begin(source, reads)
            look = MIN_LOOK_SECONDS
            while state == "PROC" and not is_stopped():
                time.sleep(look)
                look = min(look * 1.5, MAX_LOOK_SECONDS)
                state = self._asked(lambda: self._agent.check_xfer_state(handle))
            with contextlib.suppress(Exception):  # one that cannot be cancelled stays with the agent
                self._asked(lambda: self._agent.release_xfer_handle(handle))
        if state == "PROC":
            time.sleep(GRACE_SECONDS)
        elif state != "DONE":
            raise WireError(f"NIXL could not read the other side's memory ({state})")

    @contextlib.contextmanager
    def _reading(self, source: bytes) -> Generator[None]:
        """While a peer is read from it stays connected; where that fails it is connected anew the next time."""
        with self._calls:
            self._num_reads[source] = self._num_reads.get(source, 0) + 1
        try:
            yield
        except Exception as error:
            with self._calls:
                self._forget(source)
            if isinstance(error, WireError):
                raise
            raise WireError(f"NIXL could not read the other side's memory ({error})") from None
        finally:
            with self._calls:
                self._num_reads[source] -= 1
                if not self._num_reads[source]:
                    del self._num_reads[source]

    def _begin(self, source: bytes, reads: Reads) -> tuple[Any, str]:
        with self._calls:
            name = self._connected(source)
            local, remote = (
                self._agent.get_xfer_descs(
                    np.stack([np.array(addresses, np.uint64), sizes, np.zeros(len(sizes), np.uint64)], axis=1), "DRAM"
                )
                for sizes in [np.array(reads.sizes, np.uint64)]
                for addresses in (reads.local, reads.remote)
            )
            handle = self._agent.initialize_xfer("READ", local, remote, name)
            return handle, self._agent.transfer(handle)

    def _connected(self, source: bytes) -> str:
        """The agent's name, the lock held."""
        name = self._peers.pop(source, None)
        if name is None:
            for other in [found for found in self._peers if found not in self._num_reads][: -MAX_PEERS + 1]:
                self._forget(other)
            name = self._agent.add_remote_agent(source)
        self._peers[source] = name
        return name

    def _forget(self, source: bytes) -> None:
        name = self._peers.pop(source, None)
        if name is not None:
            with contextlib.suppress(Exception):  # one that is gone is forgotten all the same
                self._agent.remove_remote_agent(name)

    def _asked(self, call: Callable[[], Any]) -> Any:
        with self._calls:
            return call()


def _agent(api: Any) -> Any:
    """A new agent, whose thread answers other agents, and pauses meanwhile: NIXL's Python classes have it spin."""
    plain = api.nixlBind.nixlAgentConfig

    class Paced(plain):
        @property
        def pthrDelay(self) -> int:
            return plain.pthrDelay.fget(self)

        @pthrDelay.setter
        def pthrDelay(self, microseconds: int) -> None:
            plain.pthrDelay.fset(self, microseconds or PAUSE_MICROSECONDS)

    api.nixlBind.nixlAgentConfig = Paced
    try:
        config = api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        return api.nixl_agent(f"fwk-{uuid.uuid4().hex}", config)
    finally:
        api.nixlBind.nixlAgentConfig = plain


def _imported() -> Any:
    try:
        return importlib.import_module("nixl_cu12._api")
    except ImportError as error:
        raise PluginError(f"kv_transfer.nixl: nixl-cu12 is installed and cannot be loaded ({error})") from None


@contextlib.contextmanager
def _own_logging() -> Generator[None]:
    """NIXL configures the logging of the whole process as it is imported: keep that from happening."""
    configure = logging.config.dictConfig
    raises = logging.raiseExceptions
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, raises
        logging.getLogger("nixl").setLevel(logging.WARNING)
