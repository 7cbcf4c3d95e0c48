"""``fwk plugins list`` and ``fwk plugins why FAMILY``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fwk.cli.common import warn
from fwk.cli.flags import Parser
from fwk.errors import ConfigError, FwkError, PluginError
from fwk.interfaces.declaration import Facts
from fwk.plugins import FAMILIES, PluginSet, choose, discover


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
    arguments = parser.parse_args(argv)
    plugins = discover(warn=None)
    if arguments.command == "list":
        print(json.dumps(_rows(plugins), indent=2) if arguments.json else _table(plugins))
        return 0
    return _why(plugins, arguments)


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
        lines += [f"  {r['name']:<18} {r['package']} {r['version']:<10} {r['state']:<7} {r['summary']}" for r in own]
    odd = [row for row in rows if row["family"] not in FAMILIES]
    lines += [f"  {row['family']}.{row['name']}: {row['summary']}" for row in odd]
    empty = [family for family in FAMILIES if not any(row["family"] == family for row in rows)]
    if empty:
        lines.append(f"\nno plugin yet: {', '.join(empty)}")
    return "\n".join(lines)


def _why(plugins: PluginSet, arguments: Any) -> int:
    family = next((name for name, f in FAMILIES.items() if arguments.family in (name, f.hook, f.option)), None)
    if family is None:
        raise ConfigError(f"unknown family {arguments.family!r}; families: {', '.join(FAMILIES)}")
    facts = _facts(plugins, arguments)
    candidates = [
        {
            "name": item.name,
            "package": f"{item.package} {item.version}",
            "rank": item.declaration.rank,
            "refusal": item.declaration.refusal(facts),
        }
        for item in sorted(plugins.family(family), key=lambda item: (-item.declaration.rank, item.name))
    ]
    broken = [b.sentence() for b in plugins.broken if b.plugin.startswith(f"{family}.")]
    try:
        chosen = choose(plugins, family, "auto", facts).chosen
        verdict = None if FAMILIES[family].takes_all or chosen is None else chosen.name
    except PluginError:
        verdict = None
    if arguments.json:
        print(json.dumps({"family": family, "auto": verdict, "candidates": candidates, "broken": broken}, indent=2))
        return 0
    option = FAMILIES[family].option
    how = "all take part" if FAMILIES[family].takes_all else f"auto would take {verdict or 'none of them'}"
    print(f"{family}: {how}" + (f" (choose with --{option.replace('_', '-')})" if option else ""))
    for c in candidates:
        state = "possible" if c["refusal"] is None else f"refused: it {c['refusal']}"
        print(f"  {c['name']:<18} rank {c['rank']:<4} {c['package']:<14} {state}")
    for sentence in broken:
        print(f"  broken: {sentence}")
    return 0


def _facts(plugins: PluginSet, arguments: Any) -> Facts:
    """The machine alone, or the machine and a model."""
    from fwk.plugins import build_config  # noqa: PLC0415
    from fwk.worker.model_setup import detect_host, settle  # noqa: PLC0415
    from fwk.worker.opened_model import open_model  # noqa: PLC0415

    if arguments.model is None:
        dtype = "float32" if arguments.dtype == "auto" else arguments.dtype
        return Facts(host=detect_host(arguments.device), dtype=dtype)
    given = {"model": arguments.model, "dtype": arguments.dtype, "device": arguments.device}
    config = build_config(plugins, given)
    try:
        return settle(config, open_model(config, plugins, warn), plugins).facts
    except FwkError as error:
        raise ConfigError(f"--model {arguments.model}: {error}") from None
