"""A worker in a process other than the engine's: what is sent there, and what is made of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fwk.config import Config
from fwk.config.wire import from_plain, to_plain
from fwk.errors import PluginError
from fwk.interfaces.executor import Worker, WorkerRecipe
from fwk.interfaces.parallel import ParallelGroup
from fwk.plugins import PluginSet, discover
from fwk.plugins.audit import Audit
from fwk_process.log import set_up_log
from fwk_process.progress import set_up_progress

if TYPE_CHECKING:
    from fwk.setup.resolve import ModelSetup

log = logging.getLogger(__name__)


def worker_recipe(config: Config, plugins: PluginSet, engine_index: int) -> WorkerRecipe:
    """Everything a process with the same plugins needs to make a worker like the one made here."""
    plain = {"config": to_plain(config), "fingerprint": plugins.fingerprint, "engine_index": engine_index}
    return WorkerRecipe(f"{__name__}:{make_worker.__name__}", plain)


def make_worker(plain: dict[str, Any], group: ParallelGroup) -> Worker:
    """The maker of ``worker_recipe``. Raises ``PluginError`` when this process sees other plugins."""
    from fwk.worker.worker import LocalWorker  # noqa: PLC0415 - torch comes with it

    config, setup = settle(plain, f"rank {group.everyone.rank}", group)
    return LocalWorker(config, setup, group, plain["engine_index"])


def settle(plain: dict[str, Any], name: str, group: ParallelGroup) -> tuple[Config, ModelSetup]:
    """The run as a process called ``name`` sees it. Raises ``PluginError`` when it sees other plugins."""
    from fwk.setup.checkpoint import open_model  # noqa: PLC0415
    from fwk.setup.resolve import resolve  # noqa: PLC0415

    config = from_plain(plain["config"])
    set_up_log(config.server.log_level, config.server.log_format, name)
    set_up_progress(not config.engine.disable_progress_bars and group.everyone.rank == 0)
    plugins = discover(config.plugins.allow_override)
    if plugins.fingerprint != plain["fingerprint"]:
        raise PluginError(
            f"the process of {name} sees other plugins ({plugins.fingerprint}) than the engine "
            f"({plain['fingerprint']}): a plugin is installed in only one of them"
        )
    Audit(plugins, is_strict=config.plugins.strict)
    return config, resolve(config, open_model(config, plugins, log.info), plugins)
