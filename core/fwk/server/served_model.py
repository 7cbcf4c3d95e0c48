"""One served model: its engines, its frontend, the application of its routes, and what is told of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import FastAPI

from fwk.config import Config
from fwk.config.wire import to_plain
from fwk.errors import FwkError
from fwk.features.declared import declared
from fwk.features.server import build_server_features
from fwk.interfaces.dialect import ModelCard
from fwk.interfaces.engine_pool import EnginePoolContext, ModelApp
from fwk.interfaces.executor import WorkerRecipe
from fwk.interfaces.feature import PromptsServed, ServerPartContext
from fwk.interfaces.served_weights import ServedWeights
from fwk.plugins import PluginFactory, PluginSet, Selection
from fwk.plugins.selection import check_strict, check_used
from fwk.server.app import Reports, build_app, unguarded_app
from fwk.server.engine_forks import EngineForks
from fwk.server.frontend import ServerFrontend
from fwk.server.helper import HelperJobs, new_helper
from fwk.server.lifecycle import LifecycleManager
from fwk.server.model_engines import FeatureCall, ModelEngines
from fwk.server.observer_dispatch import Observers
from fwk.server.parsers import Parsers, tool_note
from fwk.server.pools import PoolBuilder
from fwk.server.route_registry import RouteRegistry
from fwk.server.server_info import describe
from fwk.server.server_plugins import ServerComponents, ServerPlugins
from fwk.setup.checkpoint import OpenedModel, open_model
from fwk.setup.sampling_defaults import FOLLOWED, preferred_sampling, sampling_defaults
from fwk.text import model_text
from fwk.types import EngineReady, tenant_of
from fwk_http.admission import AdmissionController
from fwk_http.keys import Keys
from fwk_http.listening import allowed_origins

Progress = Callable[[str], None]

MAX_WAIT_FOR_PAUSE = 10.0
POLL_SECONDS = 0.1
"""How long a first pause between requests is waited for, and how often it is looked for."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all models of a server have in common.

    reports: what the server says of itself, given a model. observers: ``ObserverContext.shared``, by plugin.
    """

    keys: Keys
    admission: AdmissionController
    reports: Callable[[ServedModel], Reports]
    observers: dict[str, dict[str, Any]]
    progress: Progress
    num_models: int


def _noted(opened: OpenedModel) -> ServedWeights | None:
    try:
        return ServedWeights.of(opened.loader, opened.checkpoint)
    except OSError:  # a file went away: the engines say so
        return None


def _room(card: ModelCard, ready: EngineReady) -> str:
    """What bounds the work, in words."""
    if card.output:
        return card.output
    least = "at least " if ready.num_block_tables > 1 else ""
    return f"{least}{ready.num_blocks // ready.num_block_tables * ready.block_size} tokens of KV cache"


class ServedModel(ModelApp):
    """A model from its opening to its end. ``start`` builds all but the engines.

    engines: where its engines come from. index: among the server's models. size: bytes of its
    files. pools: dictionaries that the pools of all models share, by plugin.
    """

    frontend: ServerFrontend
    app: FastAPI
    running: ServerPlugins

    def __init__(
        self,
        config: Config,
        plugins: PluginSet,
        engines: EngineForks,
        index: int,
        size: int,
        pools: dict[str, dict[str, Any]],
    ) -> None:
        self.config = config
        self._plugins = plugins
        self._factory = PluginFactory(plugins, config.plugin_options)
        self.lifecycles = LifecycleManager()
        name = (config.model.served_model_name or (config.model.model,))[0]
        context = partial(EnginePoolContext, model=config.model.model, name=name, model_index=index, model_bytes=size)
        self._pools = PoolBuilder(config, plugins, engines, context, pools)
        self.engines = ModelEngines(config, self._pools.build)
        self._selections: list[Selection] = [*self._pools.selections]
        self._observers = Observers()
        self._ready: EngineReady | None = None
        self._helper = new_helper(config)
        self._pausing: asyncio.Task[None] | None = None
        self._admission: AdmissionController | None = None
        self._has_started = False
        self._keys = Keys()
        self._on = [*self._pools.by_plugin, *(item.key for item, _, _ in declared(self._factory))]

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.frontend.card.name

    @property
    def routes(self) -> RouteRegistry:
        """The routes of its application."""
        return self.app.state.routes

    def is_called(self, name: str) -> bool:
        """Whether a request's ``model`` is this one."""
        return self.frontend.is_called(name)

    async def start(self, shared: Shared) -> None:
        """Open the model and build what serves it, engines excepted."""
        self._keys = shared.keys
        self._admission = shared.admission
        opened = open_model(self.config, self._plugins, shared.progress)
        for lifecycle in self._pools.lifecycles:
            await self.lifecycles.begin(lifecycle)
        self._build(opened, shared)
        if opened.task == "generate":
            self.frontend.prepare()
        for item, part in self.frontend.parts:
            await self.lifecycles.begin(part.context.lifecycle)
            self.routes.register(item.key, part.routes, part.admin_routes, public=part.public_paths)
        await self.running.start()
        self._has_started = True

    async def settle(self, ready: EngineReady) -> None:
        """The engines serve: complete the model card with what only they know."""
        is_first = self._ready is None
        self._ready = ready
        frontend = self.frontend
        frontend.card = replace(frontend.card, max_model_len=ready.max_model_len, vocab_size=ready.vocab_size)
        if not is_first:
            return
        await frontend.parts.ready()
        frontend.use_grammars(ready.chosen.get("grammar", "none"))
        self._pausing = asyncio.create_task(self._first_pause(), name="fwk-first-pause")
        await self.running.ready(ready.chosen)

    async def _first_pause(self) -> None:
        """Have features prepare for what comes, in a pause between requests, or when none comes."""
        deadline = time.monotonic() + MAX_WAIT_FOR_PAUSE
        while self._admission is not None and not self._admission.is_empty and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(self.frontend.parts.first_pause)

    def told(self) -> tuple[list[str], str]:
        """For the log, once it serves: lines of notes and plugins, and what bounds the work."""
        assert self._ready is not None
        ready = self._ready
        chosen = ", ".join(f"{family} {name}" for family, name in sorted(ready.chosen.items()))
        num_engines = self._pools.num_engines
        engines = f"{num_engines} engines, " if num_engines > 1 else ""
        notes = [f"note: {reason}" for reason in self._reasons(ready)]
        return [*notes, f"plugins: {chosen}"], engines + _room(self.frontend.card, ready)

    async def close(self) -> None:
        """End all of it."""
        if self._pausing is not None:
            self._pausing.cancel()
        self._helper.close()
        if self._has_started:
            self.frontend.parts.close()
            self.frontend.close()
        await asyncio.to_thread(self._observers.close)
        await self.lifecycles.end()
        await self.engines.pool.close()

    def _card(self, opened: OpenedModel) -> ModelCard:
        name, *other_names = self.config.model.served_model_name or (opened.name,)
        prompts = opened.served.prompts or PromptsServed()
        return ModelCard(
            name,
            str(opened.path),
            int(time.time()),
            opened.max_model_len,
            opened.config.vocab_size,
            opened.task,
            prompts.vector_size,
            tuple(other_names),
            prompts.labels,
            prompts.has_token_vectors,
            opened.eos_token_ids,
            opened.config.raw if opened.runner == "pool" else {},
            max_input_len=self.config.model.max_req_input_len,
            shortens_prompts=self.config.model.long_truncation_mode != "none",
        )

    def _build(self, opened: OpenedModel, shared: Shared) -> None:
        config, plugins = self.config, self._plugins
        text = model_text(opened.checkpoint, config.model, opened.config.vocab_size)
        card = self._card(opened)
        generation, vocab_size = opened.checkpoint.generation_config(), opened.config.vocab_size
        defaults = sampling_defaults(config.model, generation, vocab_size, opened.config.raw.get(FOLLOWED, ()))
        parsers = Parsers(config, plugins, text.chat_template)
        note = tool_note(parsers, text.shows_tools) if opened.task == "generate" and text.has_tokenizer else None
        if note is not None:
            shared.progress(f"note: {note}")
        self._selections += [parsers.tool.selection, parsers.reasoning.selection]
        check_strict(config.plugins.strict, self._reasons(None))
        names = {"tool_parsers": parsers.tool.name, "reasoning_parsers": parsers.reasoning.name}
        check_used(plugins, config.plugin_options, names)
        self.frontend = ServerFrontend(
            card, text, self.engines, plugins, self._observers, defaults, parsers, config.server
        )
        self.frontend.preferred_sampling = preferred_sampling(config.model.preferred_sampling_params)
        self.frontend.weights = _noted(opened)
        self.frontend.key_names = {tenant_of(key): name for name, key in shared.keys.named.items()}
        reports = shared.reports(self)
        if shared.num_models > 1:
            self.app = unguarded_app([], [], reports=reports, keys=shared.keys, admission=shared.admission)
        else:
            self.app = build_app(
                [],
                [],
                reports=reports,
                keys=shared.keys,
                max_body_bytes=config.server.max_body_bytes,
                admission=shared.admission,
                allowed_origins=allowed_origins(config.server),
            )
        components = ServerComponents(
            self.frontend, self._observers, parsers, self.routes, self.engines, self.lifecycles, self.degraded,
            shared.observers,
        )  # fmt: skip
        self.routes.is_called = self.frontend.is_called
        self.running = ServerPlugins(config, plugins, components, text.chat_template)
        self._open_features(opened)
        for key, pool in self._pools.by_plugin.items():
            self.routes.register(key, lambda app: None, pool.admin_routes)

    def _open_features(self, opened: OpenedModel) -> None:
        frontend = self.frontend
        context = partial(
            ServerPartContext,
            model_name=frontend.card.name,
            text=frontend.text,
            frontend=frontend,
            has_admin=self.routes.has_admin,
            task=frontend.card.task,
            prompts=opened.served.prompts,
            config=opened.config,
            inputs=opened.served.inputs,
            note_weights=self._note_weights,
            encoder=self._encoder,
            running=self.running,
        )
        jobs = partial(HelperJobs, self._helper)
        frontend.parts = build_server_features(
            self._factory, context, self.engines.call_feature, self.lifecycles.make, jobs, self.engines.exclusive
        )
        self.engines.on_begin = self._engine_begins

    def _encoder(self, feature: str, device: int, threads: int) -> WorkerRecipe:
        """Of a worker that encodes: ``ServerPartContext.encoder``."""
        config = to_plain(self.config)
        config["engine"]["cpu_threads"] = threads
        fields = {"fingerprint": self._plugins.fingerprint, "engine_index": device, "feature": feature}
        return WorkerRecipe("fwk.worker.encoding:make_encoder", {"config": config, **fields})

    async def _engine_begins(self, call: FeatureCall) -> None:
        """An engine has started in another's place: features tell it what they told that one."""
        for item, part in self.frontend.parts:

            async def ask(operation: str, *args: Any, name: str = item.name) -> Any:
                return await call(name, operation, args)

            await part.engine_begins(ask)

    def degraded(self) -> str | None:
        """What of it cannot be used, while it serves."""
        if not self._has_started:
            return self.engines.pool.degraded()
        of_parts = (self.frontend.parts.trouble(), self._helper.trouble)
        troubles = (self.engines.pool.degraded(), *of_parts, *self._plugins.left_out)
        return "; ".join(dict.fromkeys(one for one in (*troubles, *self.engines.pool.stats.troubles) if one)) or None

    def _note_weights(self, model: str, load_format: str | None) -> ServedWeights | None:
        """The files of a checkpoint as they are now; None when there is none, which an engine will say."""
        given = {"model": model, "load_format": load_format or self.config.model.load_format, "revision": None}
        config = replace(self.config, model=self.config.model.model_copy(update=given))
        try:
            return _noted(open_model(config, self._plugins, lambda line: None))
        except FwkError:
            return None

    def _reasons(self, ready: EngineReady | None) -> list[str]:
        """A sentence for every fallback: those of the engines, once they serve, and those of this process."""
        own = [reason for selection in self._selections for reason in selection.reasons()]
        return [*(ready.reasons if ready is not None else []), *own]

    def _refused(self, ready: EngineReady | None) -> dict[str, dict[str, str]]:
        own = {selection.family: told for selection in self._selections if (told := selection.refusals())}
        return {**(ready.refused if ready is not None else {}), **own}

    def info(self) -> dict[str, Any]:
        """/server_info: what runs here. No secrets."""
        ready = self._ready
        running = self.running if self._has_started else None
        config = running.config if running is not None else self.config
        chosen = dict(ready.chosen) if ready is not None else {}
        if running is not None:
            chosen |= running.chosen()
        return {
            **describe(config, self._plugins, self._keys),
            "chosen": chosen,
            "active": sorted([*self._on, *(running.active() if running is not None else [])]),
            "active_fingerprint": running.fingerprint(chosen) if running is not None and ready is not None else None,
            "reasons": self._reasons(ready),
            "refused": self._refused(ready),
            "missed_events": self._observers.missed(),
            "max_model_len": ready.max_model_len if ready else None,
            "kv_cache": {"num_blocks": ready.num_blocks, "block_size": ready.block_size} if ready else None,
            "replicas": self.engines.pool.info(),
        }
