"""``fwk plugins list``, ``why`` and ``freeze``: look at the installed plugins."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fwk.cli.common import warn
from fwk.cli.option_parsing import Parser
from fwk.config import Config
from fwk.errors import ConfigError
from fwk.plugins import FAMILIES, PluginSet, discover
from fwk.plugins.families import closest
from fwk.plugins.selection import is_named
from fwk_kit.cli.output import output_file


def list_plugins(argv: Sequence[str]) -> int:
    """``fwk plugins list``."""
    parser = Parser("fwk plugins list", description="What is installed, from which package, in which state.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    plugins = discover(warn=None)
    print(json.dumps(_rows(plugins), indent=2) if arguments.json else _table(plugins))
    return 0


def freeze(argv: Sequence[str]) -> int:
    """``fwk plugins freeze``."""
    from fwk.plugins.lock import frozen  # noqa: PLC0415

    parser = Parser("fwk plugins freeze", description="The resolved set as JSON, for --plugins-lock.")
    parser.add_argument("--output", metavar="FILE", type=output_file, help="write it there (default: print it)")
    parser.add_argument("--json", action="store_true", help="print JSON (it always is)")
    arguments = parser.parse_args(argv)
    text = json.dumps(frozen(discover(warn=warn)), indent=2) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text)
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
            "state": "ok" if is_named(item, {}) else "off",
            "touches": sorted(item.declaration.touches),
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
    if row["state"] == "broken":
        return f"{words}{row['state']:<6} {row['summary']}"
    options = ", ".join("--" + name.replace("_", "-") for name in row["options"])
    notes = [f" ({options})" if options else "", f"; touches {', '.join(row['touches'])}" if row["touches"] else ""]
    if row["state"] == "off":
        by = "--enable-plugin or an option of its own" if row["options"] else "--enable-plugin"
        notes.append(f"; off until {by} names it")
    return f"{words}api {row['api']} {row['load_ms']:>5} ms  {row['summary']}{''.join(notes)}"


def why(argv: Sequence[str]) -> int:
    """``fwk plugins why``."""
    from fwk_kit.cli import plugin_why  # noqa: PLC0415

    parser = Parser("fwk plugins why", description="A family's candidates, and why each would be taken or refused.")
    parser.add_argument("family", help="family or hook name, such as attention")
    parser.add_argument("--model", help="judge for this model (default: for the machine alone)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--with", dest="given", nargs=argparse.REMAINDER, default=[], metavar="OPTION",
        help="judge for a run with these options of fwk serve; all that follows is taken for them",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    plugins = discover(warn=None)
    family = next((name for name, f in FAMILIES.items() if arguments.family in (name, f.hook, f.option)), None)
    if family is None:
        hint = closest(str(arguments.family), FAMILIES)
        raise ConfigError(f"unknown family {arguments.family!r}{hint}; families: {', '.join(FAMILIES)}")
    answer = plugin_why.why(plugins, family, _config(plugins, arguments))
    print(json.dumps(asdict(answer), indent=2) if arguments.json else plugin_why.as_text(answer))
    return 0


def _config(plugins: PluginSet, arguments: Any) -> Config:
    """The options of the run that is asked about; ``model`` is empty for none."""
    from fwk.cli.option_parsing import add_option_flags, parse  # noqa: PLC0415
    from fwk.plugins import build_config  # noqa: PLC0415

    parser = Parser("fwk plugins why --with", add_help=False, allow_abbrev=False)
    add_option_flags(parser, plugins)
    namespace, unknown, others = parse(parser, arguments.given)
    if unknown:
        build_config(plugins, {unknown[0].partition("=")[0]: "true"})
        parser.error(f"unexpected argument {unknown[0]!r}")
    given = {"dtype": arguments.dtype, "device": arguments.device, "model": "", **vars(namespace), **others}
    if arguments.model is not None:
        given["model"] = arguments.model
    return build_config(plugins, given)
