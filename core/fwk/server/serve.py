"""Run the server: bind, open the model, start the engine, answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI

from fwk import __version__
from fwk.config import Config
from fwk.engine.adapters import adapter_paths
from fwk.errors import ConfigError, EngineDead, PluginError
from fwk.interfaces.balance import BalanceContext, LoadBalancer
from fwk.interfaces.declaration import Facts
from fwk.interfaces.dialect import ModelCard
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.interfaces.lora import LoRASourceContext
from fwk.plugins import PluginFactory, PluginSet, Selection, choose
from fwk.plugins.selection import check_strict, check_used
from fwk.process.file_limits import allow_more_descriptors
from fwk.process.gc import gc_paused
from fwk.process.malloc import Heap, return_large_blocks
from fwk.server.admission import AdmissionController
from fwk.server.app import Reports, build_app
from fwk.server.engine_process import EngineProcess
from fwk.server.frontend import ServerFrontend
from fwk.server.helper import new_helper, vet_grammar
from fwk.server.lifecycle import LifecycleManager
from fwk.server.listening import Listening, bounds, forget, listen, warn_if_open
from fwk.server.observer_dispatch import Observers
from fwk.server.parsers import Parsers, tool_note
from fwk.server.replicas import Replicas
from fwk.server.route_registry import RouteRegistry
from fwk.server.server_info import describe
from fwk.server.switching import PluginSwitcher, ServerComponents
from fwk.setup.checkpoint import OpenedModel, locate, num_bytes, open_model
from fwk.setup.sampling_defaults import sampling_defaults
from fwk.text import ModelText
from fwk.text.grammars import Grammars
from fwk.types import EngineReady, tenant_of
from fwk_http.addresses import address
from fwk_http.server import HttpServer

log = logging.getLogger(__name__)

EXIT_GIVEN_UP = 70


def serve(config: Config, plugins: PluginSet, progress: Callable[[str], None], engines: Sequence[EngineProcess]) -> int:
    """Serve until a signal or the engine's end. Returns the process's exit code. ``engines``: a process for each."""
    listening = listen(config.server)
    warn_if_open(config.server, listening.keys)
    allow_more_descriptors()
    return_large_blocks()
    path = locate(config, plugins, progress)  # fetch first, with progress: the engine process then finds it in place
    for engine in engines:
        engine.model_bytes = num_bytes(path)
    runner = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415 - not on every platform

        runner = uvloop.run
    try:
        return runner(_Server(config, plugins, listening, progress, engines).run())
    finally:
        forget(config.server)


def _load_balancer(
    config: Config, factory: PluginFactory, lifecycles: LifecycleManager, selection: Selection
) -> tuple[LoadBalancer, PluginLifecycle]:
    item = selection.chosen
    assert item is not None
    check_used(factory.plugins, config.plugin_options, {"load_balancers": item.name})
    lifecycle = lifecycles.make(item.source)
    num_replicas = config.engine.data_parallel_size
    return factory.build(item, BalanceContext, num_replicas=num_replicas, lifecycle=lifecycle), lifecycle


def _room(card: ModelCard, ready: EngineReady) -> str:
    """What bounds the work, in words."""
    if card.embedding_size:
        if card.labels:
            return f"{len(card.labels)} scores of an input, of at most {card.max_model_len} tokens"
        what = "embeddings" if card.task == "embed" else "vectors"
        return f"{what} of {card.embedding_size} numbers, inputs of at most {card.max_model_len} tokens"
    least = "at least " if ready.num_block_tables > 1 else ""
    return f"{least}{ready.num_blocks // ready.num_block_tables * ready.block_size} tokens of KV cache"


def _ending_signals() -> list[signal.Signals]:
    """Signals that end the server in good order: a closing terminal's, too, unless it is to be ignored (nohup)."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    return numbers if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*numbers, signal.SIGHUP]


class _Server:
    """One server's life."""

    def __init__(
        self,
        config: Config,
        plugins: PluginSet,
        listening: Listening,
        progress: Callable[[str], None],
        engines: Sequence[EngineProcess],
    ) -> None:
        self._config = config
        self._plugins = plugins
        self._factory = PluginFactory(plugins, config.plugin_options)
        self._listening = listening
        self._progress = progress
        self._lifecycles = LifecycleManager()
        self._selections = [choose(plugins, "load_balancers", config.engine.load_balance_method, Facts())]
        balancer, self._balancers_life = _load_balancer(config, self._factory, self._lifecycles, self._selections[0])
        self._client = Replicas(config, plugins.fingerprint, balancer, engines)
        self._plugin_switcher: PluginSwitcher | None = None
        self._observers = Observers()
        self._admission = AdmissionController(config.server, self._client.max_open)
        self._ready: EngineReady | None = None
        self._helper = new_helper(config)
        self._started = time.monotonic()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        stop, hurry = asyncio.Event(), asyncio.Event()
        for number in _ending_signals():
            loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
        frontend: ServerFrontend | None = None
        try:
            await self._client.start()
            with gc_paused():
                opened = open_model(self._config, self._plugins, self._progress)
                await self._lifecycles.begin(self._balancers_life)
                frontend, app, self._plugin_switcher = self._build(opened)
                if opened.task == "generate":
                    frontend.prepare()
                await self._plugin_switcher.start()
            http = HttpServer(app, bounds(self._config.server), self._listening.tls)
            serving = asyncio.create_task(http.serve(self._listening.socket))
            resting = asyncio.create_task(self._rest())
            code = await self._until_stopped(stop, serving, frontend)
            await self._drain(hurry)
            http.stop()
            await self._client.close()  # whoever still waits for tokens is told that there will be none
            await serving
            resting.cancel()
            return code
        finally:
            self._helper.close()
            if frontend is not None:
                frontend.close()
            await asyncio.to_thread(self._observers.close)
            await self._lifecycles.end()
            await self._client.close()

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
        draining = asyncio.create_task(self._lifecycles.drain())
        waits = [asyncio.create_task(self._admission.empty()), asyncio.create_task(hurry.wait())]
        timeout = self._config.server.shutdown_timeout
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await draining

    async def _until_stopped(self, stop: asyncio.Event, serving: asyncio.Task[None], frontend: ServerFrontend) -> int:
        stopped = asyncio.create_task(stop.wait())
        ready = asyncio.create_task(self._client.wait_ready())
        await asyncio.wait([stopped, ready, serving], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            stopped.cancel()
            return 0 if stop.is_set() else 1
        try:
            self._settle(ready.result(), frontend)
            if self._plugin_switcher is not None:
                await self._plugin_switcher.ready(ready.result().chosen)
        except (EngineDead, PluginError) as error:
            log.critical("fwk: error: %s", error)
            stopped.cancel()
            return error.exit_code
        given_up = asyncio.create_task(self._client.given_up.wait())
        await asyncio.wait([stopped, serving, given_up], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        given_up.cancel()
        if self._client.given_up.is_set():
            log.critical("fwk: error: no engine can be kept alive, so the server ends; its log says what they died of")
            return EXIT_GIVEN_UP
        return 0

    def _settle(self, ready: EngineReady, frontend: ServerFrontend) -> None:
        """The engine serves: complete the model card with what only it knows, and say so."""
        self._ready = ready
        for adapter in ready.adapters:
            frontend.add_adapter(adapter, adapter.name)
        frontend.card = replace(frontend.card, max_model_len=ready.max_model_len, vocab_size=ready.vocab_size)
        frontend.use_grammars(ready.chosen.get("grammar", "none"))
        if frontend.grammar_kinds:
            self._helper.start()
        for reason in self._reasons(ready):
            self._progress(f"note: {reason}")
        where = address(self._listening.socket, self._listening.tls is not None)
        num_engines = self._config.engine.data_parallel_size
        engines = f"{num_engines} engines, " if num_engines > 1 else ""
        chosen = ", ".join(f"{family} {name}" for family, name in sorted(ready.chosen.items()))
        self._progress(f"plugins: {chosen}")
        self._progress(
            f"fwk {__version__} serves {frontend.card.name} at {where} "
            f"({time.monotonic() - self._started:.1f} s; {engines}{_room(frontend.card, ready)})"
        )

    def _build(self, opened: OpenedModel) -> tuple[ServerFrontend, FastAPI, PluginSwitcher]:
        config, plugins = self._config, self._plugins
        name, *other_names = config.model.served_model_name or (opened.name,)
        text = ModelText(opened.checkpoint, config.model, opened.config.vocab_size)
        card = ModelCard(
            name,
            str(opened.path),
            int(time.time()),
            opened.max_model_len,
            opened.config.vocab_size,
            opened.task,
            opened.served.vector_size,
            tuple(other_names),
            opened.served.labels,
            opened.served.pooling is not None and opened.served.pooling.kind == "token",
            opened.config.raw if opened.runner == "pool" else {},
        )
        generation, vocab_size = opened.checkpoint.generation_config(), opened.config.vocab_size
        defaults = sampling_defaults(config.model, generation, vocab_size)
        for adapter in adapter_paths(config):
            if card.is_called(adapter):
                raise ConfigError(f"--lora-paths: {adapter!r} is the served model's own name")
        parsers = Parsers(config, plugins, text.chat_template)
        note = tool_note(parsers, text.shows_tools) if opened.task == "generate" else None
        if note is not None:
            self._progress(f"note: {note}")
        vet = partial(vet_grammar, self._helper, config.server.grammar_timeout)
        grammars = Grammars(self._factory, lambda: text, opened.config.vocab_size, opened.eos_token_ids, vet)
        self._selections += [parsers.tool.selection, parsers.reasoning.selection]
        check_strict(config.plugins.strict, self._reasons(None))
        names = {"tool_parsers": parsers.tool.name, "reasoning_parsers": parsers.reasoning.name}
        check_used(plugins, config.plugin_options, names)
        frontend = ServerFrontend(card, text, self._client, plugins, self._observers, defaults, grammars, parsers)
        if config.engine.enable_lora:
            for adapter in adapter_paths(config):
                frontend.expect_adapter(adapter)
            sources = self._factory.build_all("lora_sources", LoRASourceContext)
            frontend.lora_sources = [source for _, source in sources]
            if frontend.can_load_adapters and not config.server.admin_api_key:
                raise ConfigError(
                    "LoRA adapters may be loaded while the server runs, but by nobody: add --admin-api-key KEY, which "
                    "adds the routes for it, or leave the folders to load from out"
                )
        app = build_app(
            [],
            [],
            reports=Reports(self._client.trouble, self._client.degraded, self._info),
            keys=self._listening.keys,
            max_body_bytes=config.server.max_body_bytes,
            admission=self._admission,
            allowed_origins=config.server.allowed_origins,
        )
        frontend.key_names = {tenant_of(key): name for name, key in self._listening.keys.named.items()}
        routes: RouteRegistry = app.state.routes
        components = ServerComponents(frontend, self._observers, parsers, routes, self._client, self._lifecycles)
        plugin_switcher = PluginSwitcher(config, plugins, components, text.chat_template)
        routes.register("plugin_switcher", lambda app: None, plugin_switcher.routes)
        return frontend, app, plugin_switcher

    def _reasons(self, ready: EngineReady | None) -> list[str]:
        """A sentence for every fallback: those of the engines, once they serve, and those of this process."""
        own = [reason for selection in self._selections for reason in selection.reasons()]
        return [*(ready.reasons if ready is not None else []), *own]

    def _refused(self, ready: EngineReady | None) -> dict[str, dict[str, str]]:
        own = {selection.family: told for selection in self._selections if (told := selection.refusals())}
        return {**(ready.refused if ready is not None else {}), **own}

    def _info(self) -> dict[str, Any]:
        """/server_info: what runs here. No secrets."""
        board, ready = self._plugin_switcher, self._ready
        config = board.config if board is not None else self._config
        chosen = dict(ready.chosen) if ready is not None else {}
        if board is not None:
            chosen |= board.chosen()
        return {
            **describe(config, self._plugins, self._listening.keys),
            "chosen": chosen,
            "active": board.active() if board is not None else [],
            "active_fingerprint": board.fingerprint(chosen) if board is not None and ready is not None else None,
            "reasons": self._reasons(ready),
            "refused": self._refused(ready),
            "missed_events": self._observers.missed(),
            "max_model_len": ready.max_model_len if ready else None,
            "kv_cache": {"num_blocks": ready.num_blocks, "block_size": ready.block_size} if ready else None,
            "replicas": self._client.info(),
        }
