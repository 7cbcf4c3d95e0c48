"""``fwk plugins new``, ``test``, ``bench`` and ``doctor``: begin a plugin, prove it, compare it, find what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fwk.cli.common import warn
from fwk.cli.option_parsing import Parser
from fwk.errors import ConfigError
from fwk.plugins import FAMILIES, discover
from fwk_kit.cli.output import output_file


def new(argv: Sequence[str]) -> int:
    """``fwk plugins new``."""
    from fwk_kit.cli.plugin_new import create, selecting  # noqa: PLC0415 - each command imports only what it needs

    parser = Parser("fwk plugins new", description="Begin a package with a plugin that works.")
    parser.add_argument("family", help="family or hook name, such as attention")
    parser.add_argument("name", help="the plugin's name; the package becomes fwk-NAME")
    parser.add_argument("--directory", default=".", help="folder to write the package into")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    plugins = discover(warn=None)
    folder = create(plugins, arguments.family, arguments.name, Path(arguments.directory))
    family = next(name for name, known in FAMILIES.items() if arguments.family in (name, known.hook, known.option))
    serve = " ".join(["fwk serve", *selecting(plugins, family, arguments.name)])
    place = folder if folder.is_absolute() else f"./{folder}"
    steps = [f"pip install {place}", f"fwk plugins test {arguments.name}", serve]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if arguments.json:
        print(json.dumps({"folder": str(folder), "files": files, "next": steps}, indent=2))
    else:
        print(f"{folder}: {', '.join(files)}\n\nnow:\n  " + "\n  ".join(steps))
    return 0


def test(argv: Sequence[str]) -> int:
    """``fwk plugins test``."""
    from fwk_kit.cli import plugin_test  # noqa: PLC0415

    parser = Parser("fwk plugins test", description="Run the contract of its family on an installed plugin.")
    parser.add_argument("name", help="name, family.name, or package")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    items = plugin_test.named(discover(warn=warn), arguments.name)
    results = [plugin_test.test(item, arguments.json) for item in items]
    if arguments.json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        print("\n".join([*map(plugin_test.told, results), plugin_test.summary(results)]))
    return 1 if any(result.failed for result in results) else 0


def bench(argv: Sequence[str]) -> int:
    """``fwk plugins bench``."""
    from fwk_kit.cli.plugin_bench import Load, as_json, as_markdown, run  # noqa: PLC0415
    from fwk_kit.cli.plugin_test import named  # noqa: PLC0415

    parser = Parser("fwk plugins bench", description="Compare a plugin with another of its family: parity and speed.")
    parser.add_argument("name", help="name, or family.name")
    parser.add_argument("--against", required=True, metavar="NAME", help="the reference, of the same family")
    parser.add_argument("--model", help="model to serve (default: a small random one)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds for each of the two, taken in turns")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=output_file,
        help="write the report there, as JSON or, for FILE.md, as Markdown",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    arguments = parser.parse_args(argv)
    plugins = discover(warn=warn)
    items = [item for item in named(plugins, arguments.name) if arguments.against in plugins.by_family[item.family]]
    if len(items) != 1:
        keys = ", ".join(item.key for item in items) or "none"
        raise ConfigError(
            f"of the plugins {arguments.name!r}, those alongside one called {arguments.against!r}: {keys}"
        )
    report = run(plugins, items[0], arguments.against, arguments.model, Load(rounds=max(1, arguments.rounds)))
    if arguments.output is not None:
        is_markdown = arguments.output.suffix == ".md"
        arguments.output.write_text(as_markdown(report) if is_markdown else as_json(report))
    print(as_json(report) if arguments.json else as_markdown(report), end="")
    return 0


def doctor(argv: Sequence[str]) -> int:
    """``fwk plugins doctor``."""
    from fwk_kit.cli import plugin_doctor  # noqa: PLC0415 - each command imports only what it needs

    parser = Parser("fwk plugins doctor", description="What is wrong with the installed plugins.")
    parser.add_argument("--allow-override", nargs="+", default=[], metavar="FAMILY.NAME", help="as for fwk serve")
    parser.add_argument("--url", help="compare with the plugins of the server at this address too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    return plugin_doctor.report(plugin_doctor.doctor(arguments.allow_override, arguments.url), arguments.json)
