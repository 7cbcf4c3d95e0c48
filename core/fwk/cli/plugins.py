"""``fwk plugins``: look at the installed plugins, prove them, and begin new ones."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fwk.cli.common import warn
from fwk.cli.flags import Parser
from fwk.config import Config
from fwk.errors import ConfigError
from fwk.plugins import FAMILIES, PluginSet, discover


def run(argv: Sequence[str]) -> int:
    """Dispatch."""
    parser = Parser("fwk plugins", description="Look at the installed plugins.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    listing = commands.add_parser("list", help="what is installed, from which package, in which state")
    listing.add_argument("--json", action="store_true", help="print JSON")
    why = commands.add_parser("why", help="the candidates of a family, and why each would be taken or refused")
    why.add_argument("family", help="family or hook name, such as attention")
    why.add_argument("--model", help="judge for this model (default: for the machine alone)")
    why.add_argument("--dtype", default="auto")
    why.add_argument("--device", default="auto")
    why.add_argument("--json", action="store_true", help="print JSON")
    why.add_argument(
        "--with", dest="given", nargs=argparse.REMAINDER, default=[], metavar="OPTION",
        help="judge for a run with these options of fwk serve; all that follows is taken for them",
    )  # fmt: skip
    doctor = commands.add_parser("doctor", help="what is wrong with the installed plugins; exit code 1 if anything is")
    doctor.add_argument("--allow-override", nargs="+", default=[], metavar="FAMILY.NAME", help="as for fwk serve")
    doctor.add_argument("--url", help="compare with the plugins of the server at this address too")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    freeze = commands.add_parser("freeze", help="the resolved set as JSON, for --plugins-lock")
    freeze.add_argument("--output", metavar="FILE", help="write it there (default: print it)")
    freeze.add_argument("--json", action="store_true", help="print JSON (it always is)")
    new = commands.add_parser("new", help="begin a package with a plugin that works")
    new.add_argument("family", help="family or hook name, such as attention")
    new.add_argument("name", help="the plugin's name; the package becomes fwk-NAME")
    new.add_argument("--directory", default=".", help="folder to write the package into")
    new.add_argument("--json", action="store_true", help="print JSON")
    test = commands.add_parser("test", help="run the contract of its family on an installed plugin")
    test.add_argument("name", help="name, family.name, or package")
    test.add_argument("--json", action="store_true", help="print JSON")
    bench = commands.add_parser("bench", help="compare a plugin with another of its family: parity and speed")
    bench.add_argument("name", help="name, or family.name")
    bench.add_argument("--against", required=True, metavar="NAME", help="the reference, of the same family")
    bench.add_argument("--model", help="model to serve (default: a small random one)")
    bench.add_argument("--rounds", type=int, default=5, help="rounds for each of the two, taken in turns")
    bench.add_argument("--output", metavar="FILE", help="write the report there, as JSON or, for FILE.md, as Markdown")
    bench.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    arguments = parser.parse_args(argv)
    return _COMMANDS[arguments.command](arguments)


def _list(arguments: Any) -> int:
    plugins = discover(warn=None)
    print(json.dumps(_rows(plugins), indent=2) if arguments.json else _table(plugins))
    return 0


def _doctor(arguments: Any) -> int:
    from fwk.cli.plugin_doctor import doctor, report  # noqa: PLC0415 - each command imports only what it needs

    return report(doctor(arguments.allow_override, arguments.url), arguments.json)


def _freeze(arguments: Any) -> int:
    from fwk.plugins.lock import frozen  # noqa: PLC0415

    plugins = discover(warn=warn)
    text = json.dumps(frozen(plugins), indent=2) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        Path(arguments.output).write_text(text)
    return 0


def _new(arguments: Any) -> int:
    from fwk.cli.plugin_new import create, selecting  # noqa: PLC0415

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


def _test(arguments: Any) -> int:
    from fwk.cli.plugin_test import named, test, told  # noqa: PLC0415

    outcomes = [test(item, arguments.json) for item in named(discover(warn=warn), arguments.name)]
    print(json.dumps([asdict(one) for one in outcomes], indent=2) if arguments.json else "\n".join(map(told, outcomes)))
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _bench(arguments: Any) -> int:
    from fwk.cli.plugin_bench import Load, as_json, as_markdown, run  # noqa: PLC0415
    from fwk.cli.plugin_test import named  # noqa: PLC0415

    plugins = discover(warn=warn)
    items = [item for item in named(plugins, arguments.name) if arguments.against in plugins.by_family[item.family]]
    if len(items) != 1:
        keys = ", ".join(item.key for item in items) or "none"
        raise ConfigError(f"of the plugins {arguments.name!r}, those beside one called {arguments.against!r}: {keys}")
    report = run(plugins, items[0], arguments.against, arguments.model, Load(rounds=max(1, arguments.rounds)))
    if arguments.output is not None:
        is_markdown = arguments.output.endswith(".md")
        Path(arguments.output).write_text(as_markdown(report) if is_markdown else as_json(report))
    print(as_json(report) if arguments.json else as_markdown(report), end="")
    return 0


def _rows(plugins: PluginSet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "family": item.family,
            "name": item.name,
            "package": item.package,
            "version": item.version,
            "api": item.api,
            "rank": item.declaration.rank,
            "state": "ok",
            "load_ms": round(plugins.load_seconds.get(item.plugin, 0.0) * 1000, 1),
            "options": list(item.declaration.options.model_fields) if item.declaration.options is not None else [],
            "summary": item.declaration.summary,
        }
        for item in plugins.all()
    ]
    for broken in plugins.broken:
        family, _, name = broken.plugin.partition(".")
        rows.append(
            {
                "family": family,
                "name": name,
                "package": broken.package,
                "version": broken.version,
                "state": "broken",
                "summary": broken.sentence(),
            }
        )
    return rows


def _table(plugins: PluginSet) -> str:
    rows = _rows(plugins)
    lines = [f"{len(rows)} plugins, fingerprint {plugins.fingerprint}"]
    for family in FAMILIES:
        own = [row for row in rows if row["family"] == family]
        if not own:
            continue
        lines.append(f"\n{family}")
        lines += [_line(row) for row in own]
    odd = [row for row in rows if row["family"] not in FAMILIES]
    lines += [f"  {row['family']}.{row['name']}: {row['summary']}" for row in odd]
    empty = [family for family in FAMILIES if not any(row["family"] == family for row in rows)]
    if empty:
        lines.append(f"\nno plugin yet: {', '.join(empty)}")
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    words = f"  {row['name']:<18} {row['package']} {row['version']:<8} "
    if row["state"] != "ok":
        return f"{words}{row['state']:<6} {row['summary']}"
    options = ", ".join("--" + name.replace("_", "-") for name in row["options"])
    return f"{words}api {row['api']} {row['load_ms']:>5} ms  {row['summary']}" + (f" ({options})" if options else "")


def _why(arguments: Any) -> int:
    from fwk.cli.plugin_why import as_text, why  # noqa: PLC0415

    plugins = discover(warn=None)
    family = next((name for name, f in FAMILIES.items() if arguments.family in (name, f.hook, f.option)), None)
    if family is None:
        raise ConfigError(f"unknown family {arguments.family!r}; families: {', '.join(FAMILIES)}")
    answer = why(plugins, family, _config(plugins, arguments))
    print(json.dumps(asdict(answer), indent=2) if arguments.json else as_text(answer))
    return 0


def _config(plugins: PluginSet, arguments: Any) -> Config:
    """The options of the run that is asked about; ``model`` is empty for none."""
    from fwk.cli.flags import add_option_flags, parse  # noqa: PLC0415
    from fwk.plugins import build_config  # noqa: PLC0415

    parser = Parser("fwk plugins why --with", add_help=False, allow_abbrev=False)
    add_option_flags(parser, plugins)
    namespace, unknown = parse(parser, arguments.given)
    if unknown:
        build_config(plugins, {unknown[0].partition("=")[0]: "true"})
        parser.error(f"unexpected argument {unknown[0]!r}")
    given = {"dtype": arguments.dtype, "device": arguments.device, "model": "", **vars(namespace)}
    if arguments.model is not None:
        given["model"] = arguments.model
    return build_config(plugins, given)


_COMMANDS = {
    "list": _list,
    "why": _why,
    "doctor": _doctor,
    "freeze": _freeze,
    "new": _new,
    "test": _test,
    "bench": _bench,
}
