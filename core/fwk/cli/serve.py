"""``fwk serve``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fwk.server.engine_forks import EngineForks, started_early
from fwk_process.gc import gc_paused

if TYPE_CHECKING:
    from fwk.cli.option_parsing import Parser


def run(argv: Sequence[str]) -> int:
    """Read the options and serve."""
    if {"-h", "--help", "--help-all"} & set(argv):
        return _serve(argv, EngineForks)
    with started_early() as engines_of:  # which import torch while plugins and the HTTP stack are imported here
        return _serve(argv, engines_of)


def _serve(argv: Sequence[str], engines_of: Callable[[int], EngineForks]) -> int:
    with gc_paused():
        from fwk.cli.common import note, read_given  # noqa: PLC0415 - after an engine was started
        from fwk.plugins.audit import Audit  # noqa: PLC0415
        from fwk.plugins.pools import engine_module, num_engines, server_configs  # noqa: PLC0415
        from fwk_http.keys import read_keys  # noqa: PLC0415
        from fwk_process.log import set_up_log  # noqa: PLC0415
        from fwk_process.progress import set_up_progress  # noqa: PLC0415

        plugins, given, _ = read_given(_parser(), argv)
        configs = server_configs(plugins, given, note)
        config = configs[0]
        tell = logging.getLogger("fwk").info
        secrets = [*read_keys(config.server).secrets, config.server.ssl_keyfile_password]
        set_up_log(config.server.log_level, config.server.log_format, secrets=secrets)
        set_up_progress(not config.engine.disable_progress_bars)
        Audit(plugins, is_strict=config.plugins.strict)
        from fwk.engine.node import worker_node  # noqa: PLC0415
        from fwk.features.declared import check_server  # noqa: PLC0415

        make_node = worker_node(configs, plugins)
        check_server(configs, plugins)
        are_here = make_node is None and not engine_module(plugins, config.plugin_options)
        engines = engines_of(num_engines(plugins, config.plugin_options) if are_here else 0)
        if make_node is not None:
            return make_node(tell).run()
        from fwk.server.serve import serve  # noqa: PLC0415 - --help needs no HTTP stack

    return serve(configs, plugins, tell, engines)


def _parser() -> Parser:
    from fwk.cli.option_parsing import Parser  # noqa: PLC0415 - after an engine was started

    parser = Parser(
        "fwk serve",
        description="Serve a model over HTTP. Without a model: SmolLM2-135M-Instruct, fetched once.",
        allow_abbrev=False,
    )
    parser.add_argument("bare_model", nargs="?", default=None, metavar="MODEL", help="folder, file, hub id or name")
    return parser
