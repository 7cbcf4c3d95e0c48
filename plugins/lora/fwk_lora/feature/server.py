"""The part in the server: which adapters there are, where they come from, and that all engines have the same."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fwk.errors import ConfigError, InvalidRequest, PluginFault
from fwk.interfaces.dialect import AdapterCard, AdapterRegistry, EmbedInput, GenerateInput
from fwk.interfaces.feature import Ask, RequestPart, ServerPart, ServerPartContext
from fwk.interfaces.lora import AdapterInfo, LoRASource, LoRASourceContext
from fwk_lora.feature import Adapted, LoRAOptions

log = logging.getLogger(__name__)


class AdapterNames(ServerPart, AdapterRegistry):
    """The adapters of ``--lora-paths``, which the engines load, and those that are loaded and unloaded later.

    A name is here before its key is: until the engines serve, requests for it are early, not wrong.
    """

    def __init__(self, context: ServerPartContext) -> None:
        """Raises ``ConfigError`` for names and places that cannot be used."""
        super().__init__(context)
        options: LoRAOptions = context.options
        self._first = options.paths
        self._cards = {name: AdapterCard(name, name, int(time.time())) for name in self._first}
        self._keys: dict[str, str] = {}
        self._paths: dict[str, str] = {}  # of those loaded while serving
        self._turn = asyncio.Lock()
        self._are_ready = asyncio.Event()
        self._sources: list[LoRASource] = []
        if context.frontend is not None:
            self._open_sources(context)

    def _open_sources(self, context: ServerPartContext) -> None:
        assert context.frontend is not None
        assert context.plugins is not None
        for name in self._first:
            if context.frontend.card.is_called(name):
                raise ConfigError(f"--lora-paths: {name!r} is the served model's own name")
        self._sources = [source for _, source in context.plugins.build_all("lora_sources", LoRASourceContext)]
        if self.can_load and not context.has_admin:
            raise ConfigError(
                "LoRA adapters may be loaded while the server runs, but by nobody: add --admin-api-key KEY, which "
                "adds the routes for it, or leave the folders to load from out"
            )

    # What dialects see of them.

    @property
    def cards(self) -> Mapping[str, AdapterCard]:
        return self._cards

    @property
    def can_load(self) -> bool:
        return any(source.is_open for source in self._sources)

    async def load(self, name: str, source: str) -> AdapterCard:
        frontend = self.context.frontend
        assert frontend is not None
        if frontend.card.is_called(name):
            raise InvalidRequest(f"{name!r} is the served model's own name", "lora_name")
        if any(peer.is_called(name) for peer in frontend.peers if peer is not frontend):
            raise InvalidRequest(f"{name!r} is what another served model, or an adapter of it, is called", "lora_name")
        for place in self._sources:
            path = await frontend.run_blocking(place.find, source)
            if path is not None:
                # A client that goes away meanwhile leaves no adapter behind that the engine has and nobody knows of.
                return await asyncio.shield(asyncio.ensure_future(self._load_card(name, str(path), source)))
        raise InvalidRequest("lora_path names no adapter in the folders this server may load from", "lora_path")

    async def _load_card(self, name: str, path: str, source: str) -> AdapterCard:
        await self._load(name, path, source)
        return self._cards[name]

    async def unload(self, name: str) -> None:
        # Gone here before an engine hears of it: what was sent before is served, nothing is sent after.
        self._keys.pop(name, None)
        self._paths.pop(name, None)
        if self._cards.pop(name, None) is None:
            raise InvalidRequest(f"no LoRA adapter {name[:128]!r} is loaded", "lora_name")
        frontend = self.context.frontend
        if frontend is not None and not frontend.is_loaded:
            return  # engines that start later do not load it again
        async with self._turn:
            await self.context.ask("unload", name)

    # What ``fwk.LLM`` does with them.

    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        return {"load_adapter": self._load, "unload_adapter": self.unload}

    async def _load(self, name: str, path: str, source: str = "") -> AdapterInfo:
        """Load the adapter in a folder into every engine that lives, or into none. Raises ``InvalidRequest``."""
        async with self._turn:
            if name in self._cards:
                raise InvalidRequest(f"a LoRA adapter {name!r} is loaded already; unload it first", "lora_name")
            try:
                infos = msgspec.convert(await self.context.ask("load", name, path), list[AdapterInfo])
                if len({info.key for info in infos}) > 1:
                    why = f"LoRA adapter {name!r} cannot be loaded: its files changed meanwhile"
                    raise InvalidRequest(why, "lora_path")
            except (InvalidRequest, PluginFault):
                await self._take_back(name)
                raise
            self._paths[name] = path
            self._add(infos[0], source or name)
            return infos[0]

    async def _take_back(self, name: str) -> None:
        """Have those engines forget an adapter that could load it."""
        try:
            await self.context.ask("unload", name)
        except (InvalidRequest, PluginFault) as error:
            log.debug("not every engine had it: %s", error)

    def _add(self, info: AdapterInfo, source: str) -> None:
        shown = info.name if Path(source).is_absolute() else source  # all clients see it: where it lies stays untold
        self._keys[info.name] = info.key
        self._cards[info.name] = AdapterCard(info.name, shown, int(time.time()))

    # Engines come and go.

    async def engines_ready(self) -> None:
        for info in msgspec.convert((await self.context.ask("adapters"))[0], list[AdapterInfo]):
            self._add(info, info.name)
        self._are_ready.set()

    async def engine_begins(self, ask: Ask) -> None:
        for name in self._first:
            if name not in self._cards or name in self._paths:
                await ask("unload", name)
        for name, path in list(self._paths.items()):
            try:
                await ask("load", name, path)
            except (InvalidRequest, PluginFault) as error:
                log.error("LoRA adapter %s is lost with the engine that died: %s", name, error)

    # Requests.

    def check(self, item: GenerateInput | EmbedInput) -> None:
        name = item.adapter if isinstance(item, GenerateInput) else ""
        if name and name not in self._cards:
            raise _unknown(name)

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        return OnAdapter(self) if isinstance(item, GenerateInput) and item.adapter else None

    async def key_of(self, name: str) -> str:
        """The key of the adapter that has a name now. Raises ``InvalidRequest``."""
        if name in self._cards and name not in self._keys:
            await self._are_ready.wait()
        if name not in self._keys:
            raise _unknown(name)
        return self._keys[name]


class OnAdapter(RequestPart):
    """A request that names an adapter."""

    def __init__(self, names: AdapterNames) -> None:
        self._names = names

    async def enter(self, item: GenerateInput) -> Adapted:
        key = self.namespace = await self._names.key_of(item.adapter)  # its K/V are no other adapter's
        return Adapted(key)


def _unknown(name: str) -> InvalidRequest:
    return InvalidRequest(f"no LoRA adapter {name[:128]!r} is loaded", "model")
