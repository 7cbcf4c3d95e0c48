"""``fwk serve``."""

from __future__ import annotations

from collections.abc import Sequence

from fwk.cli.common import note, read_options, set_up_log
from fwk.cli.flags import Parser
from fwk.server.engine_process import started_early


def run(argv: Sequence[str]) -> int:
    """Read the options and serve."""
    parser = Parser(
        "fwk serve",
        description="Serve a model over HTTP. Without a model: SmolLM2-135M-Instruct, fetched once.",
        allow_abbrev=False,
    )
    parser.add_argument("bare_model", nargs="?", default=None, metavar="MODEL", help="folder, file, hub id or name")
    plugins, config, _ = read_options(parser, argv)
    set_up_log(config.server.log_level, [config.server.api_key, config.server.admin_api_key])
    with started_early(config) as engines:  # which import torch while the HTTP stack is imported here
        from fwk.server.serve import serve  # noqa: PLC0415 - --help needs no HTTP stack

        return serve(config, plugins, note, engines)
