"""Run the server: bind, open the models, start the engines, answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.types import ASGIApp

from fwk import __version__
from fwk.config import Config
from fwk.errors import ConfigError, EngineDead, PluginError
from fwk.interfaces.dialect import openai_error
from fwk.plugins import PluginSet
from fwk.plugins.pools import model_router
from fwk.plugins.selection import probable_kernels
from fwk.server.app import Reports, guarded
from fwk.server.engine_forks import EngineForks
from fwk.server.served_model import ServedModel, Shared
from fwk.setup.checkpoint import locate, num_bytes
from fwk.types import EngineReady
from fwk_http.addresses import address
from fwk_http.admission import AdmissionController
from fwk_http.handover import Offer
from fwk_http.listening import Listening, allowed_origins, bounds, forget, listen, offer, warn_if_open
from fwk_http.server import HttpServer
from fwk_native.ahead import build_ahead
from fwk_process.file_limits import allow_more_descriptors
from fwk_process.gc import gc_paused
from fwk_process.malloc import Heap, return_large_blocks
from fwk_process.memory_limits import memory_in_words

log = logging.getLogger(__name__)

EXIT_GIVEN_UP = 70

LAST_REQUESTS_SECONDS = 10.0
"""What a replaced server waits, at most, for requests on connections that it accepted just before."""

POLL_SECONDS = 0.05


def serve(configs: Sequence[Config], plugins: PluginSet, progress: Callable[[str], None], engines: EngineForks) -> int:
    """Serve models until a signal or the engine's end. Returns the process's exit code.

    ``configs``: of each model; the first one's holds for the server. ``engines``: has begun those of the first.
    """
    options = configs[0].server
    listening = listen(options)
    warn_if_open(options, listening.keys)
    allow_more_descriptors()
    return_large_blocks()
    build_ahead(probable_kernels(configs, plugins))
    # fetch first, with progress: the engine process then finds it in place
    sizes = [num_bytes(locate(config, plugins, progress)) for config in configs]
    for engine in engines.begun:
        engine.model_bytes = sizes[0]
    engines.settle(stays=options.health_monitor and options.spare_engines > 0)
    runner = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415 - not on every platform

        runner = uvloop.run
    server = _Server(configs, sizes, plugins, listening, progress, engines)
    try:
        return runner(server.run())
    finally:
        if not server.is_replaced and (listening.predecessor is None or server.has_served):
            forget(options)


def _ending_signals() -> list[signal.Signals]:
    """Signals that end the server in good order: a closing terminal's, too, unless it is to be ignored (nohup)."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    return numbers if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*numbers, signal.SIGHUP]


def _error_body(status: int, message: str) -> bytes:
    return orjson.dumps(openai_error(status, message))


class _Server:
    """One server's life."""

    def __init__(
        self,
        configs: Sequence[Config],
        sizes: Sequence[int],
        plugins: PluginSet,
        listening: Listening,
        progress: Callable[[str], None],
        engines: EngineForks,
    ) -> None:
        self._options = configs[0].server
        self._listening = listening
        self._progress = progress
        self._plugins = plugins
        pools: dict[str, dict[str, Any]] = {}
        self._models = [
            ServedModel(config, plugins, engines, index, size, pools)
            for index, (config, size) in enumerate(zip(configs, sizes, strict=True))
        ]
        self._first = self._models[0]
        self._admission = AdmissionController(self._options, sum(m.engines.pool.max_open for m in self._models))
        self._started = time.monotonic()
        self._serves = asyncio.Event()
        self._serving = asyncio.Event()
        self._offer: Offer | None = None
        self.is_replaced = False

    @property
    def has_served(self) -> bool:
        return self._serves.is_set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        stop, hurry = asyncio.Event(), asyncio.Event()
        for number in _ending_signals():
            loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
        try:
            await self._first.engines.pool.start()
            with gc_paused():
                app = await self._build()
            log.info("%s", memory_in_words())
            http = HttpServer(app, bounds(self._options, _error_body), self._listening.tls)
            serving = asyncio.create_task(self._serve(http))
            resting = asyncio.create_task(self._rest())
            code = await self._until_stopped(stop, serving)
            if self.is_replaced:
                await self._retire(http, stop)
            if self._listening.predecessor is not None and not self.has_served:
                serving.cancel()
            await self._drain(hurry)
            http.stop()
            # whoever still waits for tokens is told that there will be none
            await asyncio.gather(*(model.engines.pool.close() for model in self._models))
            await asyncio.gather(serving, return_exceptions=serving.cancelling() > 0)
            resting.cancel()
            return code
        finally:
            for model in self._models:
                await model.close()

    async def _build(self) -> ASGIApp:
        """The application: of one model, or of several with what stands before all of them."""
        shared = Shared(
            self._listening.keys, self._admission, self._reports, {}, self._progress, num_models=len(self._models)
        )
        for model in self._models:
            await model.start(shared)
            model.engines.pool.on_ready = partial(self._woken, model)
        for model in self._models[1:]:
            await model.engines.pool.start()
        if len(self._models) == 1:
            return self._first.app
        self._check_names()
        for model in self._models:
            model.frontend.join([other.frontend for other in self._models])
        return guarded(
            model_router(self._plugins, self._first.config)(self._models),
            [model.routes for model in self._models],
            self._options.max_body_bytes,
            self._admission,
            allowed_origins(self._options),
        )

    def _check_names(self) -> None:
        seen: set[str] = set()
        for model in self._models:
            for name in model.frontend.names:
                if name in seen:
                    raise ConfigError(
                        f"two of what requests can name are called {name!r}: --served-model-name gives one another name"
                    )
                seen.add(name)

    def _reports(self, model: ServedModel) -> Reports:
        return Reports(self._trouble, self._degraded, partial(self._info, model))

    def _trouble(self) -> str | None:
        """Why no model can be served; while the first one is starting, that."""
        troubles = [model.engines.pool.trouble() for model in self._models]
        if troubles[0] is not None and not self._first.engines.pool.has_started:
            return troubles[0]
        return troubles[0] if all(troubles) else None

    def _degraded(self) -> str | None:
        if len(self._models) == 1:
            return self._first.degraded()
        found = [(model.name, model.engines.pool.trouble() or model.engines.pool.degraded()) for model in self._models]
        return "; ".join(f"{name}: {why}" for name, why in found if why) or None

    def _info(self, model: ServedModel) -> dict[str, Any]:
        info = model.info()
        if len(self._models) > 1:
            info["models"] = [{"name": one.name, **one.engines.pool.summary()} for one in self._models]
        return info

    async def _serve(self, http: HttpServer) -> None:
        """Serve at once, and say 503 until the engines do; in place of another server, once they do."""
        if self._listening.predecessor is not None:
            await self._serves.wait()
            await asyncio.to_thread(self._listening.predecessor.replace)
        self._offer = offer(self._listening)
        self._serving.set()
        await http.serve(self._listening.socket)

    async def _retire(self, http: HttpServer, stop: asyncio.Event) -> None:
        """Another server has the listener: answer what has been accepted."""
        self._progress("another server has taken over: this one finishes what it has, and ends")
        http.retire()
        if self._offer is not None:
            self._offer.release()
        stopped = asyncio.create_task(stop.wait())
        num_polls_without = 0  # two in a row: a request that has just come whole is counted by the admission then
        for _ in range(int(LAST_REQUESTS_SECONDS / POLL_SECONDS)):
            await asyncio.wait([stopped], timeout=POLL_SECONDS)
            num_polls_without = 0 if http.awaits_requests else num_polls_without + 1
            if stopped.done() or num_polls_without == 2:
                break
        emptied = asyncio.create_task(self._admission.empty())
        await asyncio.wait(
            [stopped, emptied], timeout=self._options.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        stopped.cancel()
        emptied.cancel()

    async def _until_replaced(self) -> None:
        """Wait until a successor serves; for ever where none can come."""
        await self._serving.wait()
        if self._offer is None:
            await asyncio.Future[None]()
        else:
            await self._offer.taken()

    async def _rest(self) -> None:
        """Give the memory of past requests back while there are none."""
        heap = Heap()
        while True:
            await asyncio.sleep(1)
            if self._admission.is_empty:
                heap.rest(self._admission.num_entered)

    async def _drain(self, hurry: asyncio.Event) -> None:
        """Answer new requests with 503 while those under way finish: until the time is up, or a second signal."""
        self._admission.close()
        draining = [asyncio.create_task(model.lifecycles.drain()) for model in self._models]
        waits = [asyncio.create_task(self._admission.empty()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=self._options.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await asyncio.gather(*draining)

    async def _until_stopped(self, stop: asyncio.Event, serving: asyncio.Task[None]) -> int:
        stopped = asyncio.create_task(stop.wait())
        ready = asyncio.create_task(self._first.engines.pool.wait_ready())
        await asyncio.wait([stopped, ready, serving], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            stopped.cancel()
            return 0 if stop.is_set() else 1
        try:
            await self._settle(ready.result())
        except (EngineDead, PluginError, ConfigError) as error:
            log.critical("fwk: error: %s", error)
            stopped.cancel()
            return error.exit_code
        self._serves.set()
        given_up = asyncio.create_task(self._first.engines.given_up.wait())
        replaced = asyncio.create_task(self._until_replaced())
        await asyncio.wait([stopped, serving, given_up, replaced], return_when=asyncio.FIRST_COMPLETED)
        self.is_replaced = replaced.done()
        for task in (stopped, given_up, replaced):
            task.cancel()
        if self._first.engines.given_up.is_set():
            log.critical("fwk: error: no engine can be kept alive, so the server ends; its log says what they died of")
            return EXIT_GIVEN_UP
        return 0

    async def _settle(self, ready: EngineReady) -> None:
        """The first model's engines serve: say so."""
        first = self._first
        await first.settle(ready)
        lines, room = first.told()
        for line in lines:
            self._progress(line)
        names = first.name
        if len(self._models) > 1:
            names += " and, on first use, " + ", ".join(model.name for model in self._models[1:])
        where = address(self._listening.socket, self._listening.tls is not None)
        self._progress(
            f"fwk {__version__} serves {names} at {where} ({time.monotonic() - self._started:.1f} s; {room})"
        )

    async def _woken(self, model: ServedModel, ready: EngineReady) -> None:
        """Engines were started for a request."""
        await model.settle(ready)
        lines, room = model.told()
        for line in lines:
            log.debug("%s: %s", model.name, line)
        self._progress(f"{model.name} is loaded ({room})")
