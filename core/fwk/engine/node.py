"""Machines that share one engine: what they must have in common, and those that only hold its workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fwk.config import Config, Options
from fwk.config.secrets import HIDDEN, without_secrets
from fwk.errors import ConfigError
from fwk.interfaces.declaration import installed_version
from fwk.interfaces.executor import ExecutorSpec, NodeContext, WorkerNode
from fwk.plugins import PluginSet, Registered
from fwk.plugins.factory import build
from fwk.plugins.families import FAMILIES
from fwk.plugins.options import flag
from fwk.plugins.pools import refuse_pools
from fwk.plugins.selection import AUTO, plugin_options
from fwk_process.kernel_caches import bound_kernel_caches
from fwk_process.threads import configure_omp_env

if TYPE_CHECKING:
    from fwk.setup.resolve import ModelSetup

OWN = frozenset({"model", "served_model_name", "download_dir", "disable_progress_bars"})
"""Options in which machines may differ: where the model is, whose files are compared, and what the server shows."""


def common(config: Config, plugins: PluginSet, setup: ModelSetup) -> dict[str, str]:
    """What all machines of a run must have in common, by the words for it; secrets are left out."""
    from fwk import __version__  # noqa: PLC0415 - fwk/__init__.py names everything else
    from fwk_files.model_hash import ModelHash  # noqa: PLC0415

    found = {
        "the version of fwk": __version__,
        **{f"the version of the plugins' package {item.package}": item.version for item in plugins.all()},
        "the set of plugins": plugins.fingerprint,
        "the version of torch": installed_version("torch"),
        "the kind of device": setup.facts.host.device,
        "--model (what its files hold)": ModelHash(setup.opened.path).result(),
        "the weights' identity": setup.opened.checkpoint.weights_identity(),
        "the model's dtype": setup.facts.dtype,
    }
    for options in (config.model, config.engine):
        found |= _shown(options, OWN)
    for key, given in config.plugin_options.items():
        item = next(item for item in plugins.all() if item.key == key)
        if item.declaration.options is not None and not FAMILIES[item.family].serves:
            local = item.declaration.local_options if isinstance(item.declaration, ExecutorSpec) else frozenset[str]()
            found |= _shown(plugin_options(item, {key: given}), local)
    return found


def _shown(options: Options, local: frozenset[str]) -> dict[str, str]:
    shown = without_secrets(type(options), options.model_dump(mode="json"))
    return {flag(name): json.dumps(value) for name, value in shown.items() if name not in local and value != HIDDEN}


def worker_node(configs: Sequence[Config], plugins: PluginSet) -> Callable[[Callable[[str], None]], WorkerNode] | None:
    """What makes this process's ``WorkerNode``, given a function that writes to the log; None where it is to serve.

    Raises ``ConfigError`` where the executor's options cannot be had in such a server.
    """
    config = configs[0]
    for item in plugins.family("executors"):
        if config.engine.executor not in (AUTO, item.name) or not isinstance(item.declaration, ExecutorSpec):
            continue
        options = plugin_options(item, config.plugin_options)
        refuse_pools(plugins, config, item.declaration.one_engine(options))
        item.declaration.check_server(configs, options)
        place = item.declaration.worker_node(options)
        if place is not None:
            return partial(_make, config, plugins, item, options, place)
    return None


def _make(
    config: Config, plugins: PluginSet, item: Registered, options: Any, place: str, say: Callable[[str], None]
) -> WorkerNode:
    from fwk.setup.checkpoint import open_model  # noqa: PLC0415 - nothing of a worker where the process serves
    from fwk.setup.resolve import resolve  # noqa: PLC0415
    from fwk.worker.remote import worker_recipe  # noqa: PLC0415

    configure_omp_env(os.environ)  # for the workers, as an engine's are started with it
    bound_kernel_caches(os.environ)
    setup = resolve(config, open_model(config, plugins, say), plugins)
    chosen = setup.resolution.item("executors")
    if chosen.key != item.key:
        raise ConfigError(f"the options of this machine are of {item.key}, but {chosen.key} was chosen: say --executor")
    recipe = worker_recipe(config, plugins, 0)
    tp_size = config.engine.tensor_parallel_size * config.engine.pipeline_parallel_size
    return build(item, NodeContext(recipe, tp_size, options, partial(common, config, plugins, setup), say), place)
