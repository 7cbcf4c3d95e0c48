"""The kit's commands, as entry points of the group ``fwk.commands`` name them."""

from fwk.interfaces.command import Command

bench = Command("measure servers, the engine, start-up, this machine", "fwk_kit.cli.bench:run")
arguments = Command("print the page of all arguments (docs/arguments.md)", "fwk_kit.cli.arguments:run")
limits = Command("print the page of all limits of requests (docs/limits.md)", "fwk_kit.cli.limits:run")
plugins_new = Command("begin a package with a plugin that works", "fwk_kit.cli.plugins:new")
plugins_test = Command("run the contract of its family on an installed plugin", "fwk_kit.cli.plugins:test")
plugins_bench = Command("compare a plugin with another of its family: parity and speed", "fwk_kit.cli.plugins:bench")
