"""Where prefill servers register, and decode servers find them: a folder of files, or etcd.

An entry is signed with the secret of the servers: a decode server sends prompts to none that another has put there.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fwk_kv_transfer.remote_prefill import RemotePrefillOptions

log = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 4096
MAX_ENTRIES = 1024
"""Of a registry; those behind them are not read."""

SECONDS = 5.0
"""For one call of a registry."""


class RegistryError(Exception):
    """The registry cannot be used now; the words go after its name."""


class Registry(ABC):
    """What holds entries, each until it was not put again for its seconds. Calls raise ``RegistryError``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def check(self) -> None:
        """Raises ``ConfigError`` where it can never be used from here."""

    @abstractmethod
    async def put(self, name: str, entry: bytes, seconds: float) -> None:
        """Put an entry, or put it again."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """Remove an entry; one that is not there is none."""

    @abstractmethod
    async def entries(self) -> list[bytes]:
        """Those that are there, ``MAX_ENTRIES`` at most."""


def open_registry(url: str) -> Registry:
    """The one of a URL; nothing is opened yet. Raises ``ValueError`` for one that names none."""
    from fwk_kv_transfer.remote_prefill.registry_etcd import EtcdRegistry  # noqa: PLC0415 - they derive from Registry
    from fwk_kv_transfer.remote_prefill.registry_file import FileRegistry  # noqa: PLC0415

    if url.startswith("file:///"):
        return FileRegistry(url)
    if re.fullmatch(EtcdRegistry.URL, url):
        return EtcdRegistry(url)
    raise ValueError(
        f"--disaggregation-registry {url}: must be file:///FOLDER or etcd://HOST:PORT (etcds:// for TLS; further "
        "HOST:PORT after commas, a prefix of keys after a slash)"
    )


class Entry(msgspec.Struct, frozen=True):
    """A prefill server. renewed: counts the times that it was put; signature: of the others, in hexadecimal."""

    url: str
    seconds: float
    renewed: int = 0
    signature: str = ""

    def signed(self, secret: bytes) -> Entry:
        return msgspec.structs.replace(self, signature=_signature(secret, self))


def _signature(secret: bytes, entry: Entry) -> str:
    said = msgspec.json.encode([entry.url, entry.seconds, entry.renewed])
    return hmac.digest(secret, b"fwk disaggregation registry\0" + said, "sha256").hex()


def read_entry(secret: bytes, data: bytes) -> str | None:
    """The URL of an entry that a server with the same secret has put; None for any other."""
    try:
        entry = msgspec.json.decode(data, type=Entry)
    except (msgspec.DecodeError, ValueError):
        return None
    is_ours = hmac.compare_digest(entry.signature.encode(), _signature(secret, entry).encode())
    return entry.url.rstrip("/") if is_ours else None


class Registration:
    """Of a prefill server: puts its entry, again and again, and removes it before the server stops."""

    def __init__(self, options: RemotePrefillOptions, secret: bytes) -> None:
        assert options.disaggregation_registry is not None
        assert options.disaggregation_advertise_url is not None
        self._registry = open_registry(options.disaggregation_registry)
        self._url, self._seconds = options.disaggregation_advertise_url, options.disaggregation_registry_lease
        self._secret = secret
        self._name = secrets.token_hex(16)
        self._renewed = 0
        self._is_served = asyncio.Event()
        self._has_ended = False
        self._calls = asyncio.Lock()
        self._trouble: str | None = None

    def trouble(self) -> str | None:
        """Why decode servers may not find this one."""
        return self._trouble

    async def begin(self) -> None:
        """The server answers from now on."""
        await self._put()
        self._is_served.set()

    async def run(self) -> None:
        await self._is_served.wait()
        while not self._has_ended:
            await asyncio.sleep(self._seconds / 3)
            await self._put()

    async def end(self) -> None:
        """Nothing new is to come here."""
        self._has_ended = True
        try:
            async with asyncio.timeout(SECONDS), self._calls:
                await self._registry.remove(self._name)
        except (RegistryError, TimeoutError) as error:
            log.info("the registry %s keeps this server until its lease ends: %s", self._registry.url, error)

    async def _put(self) -> None:
        if self._has_ended:
            return
        self._renewed += 1
        entry = msgspec.json.encode(Entry(self._url, self._seconds, self._renewed).signed(self._secret))
        try:
            async with asyncio.timeout(SECONDS), self._calls:
                await self._registry.put(self._name, entry, self._seconds)
        except (RegistryError, TimeoutError) as error:
            why = f"the registry {self._registry.url} {error or f'has not answered within {SECONDS:g} seconds'}"
            if self._trouble is None:
                log.warning("%s: this server is not registered until it answers", why)
            self._trouble = why
        else:
            if self._trouble is not None or self._renewed == 1:
                log.info("this server is registered at %s as %s", self._registry.url, self._url)
            self._trouble = None
