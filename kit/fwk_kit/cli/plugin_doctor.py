"""``fwk plugins doctor``: what is wrong with the installed plugins, and what to do about it."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import Distribution, distributions, entry_points
from importlib.util import find_spec
from inspect import isfunction
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from fwk.errors import ConfigError, PluginLoadError
from fwk.interfaces.declaration import Host
from fwk.plugins import FAMILIES, PluginSet, discover, load_object
from fwk.plugins.discovery import GROUP, OWN
from fwk_http.clients import Allowance, open_here, pieces_of

SLOW_SECONDS = 0.01
"""Declaring should cost less: ``fwk --help`` declares everything that is installed."""

INFO_SECONDS = 10.0
MAX_INFO_BYTES = 4 * 2**20
"""Of a server's answer to what it is."""

PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""What names an object to import in a declaration."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (``error``), will be (``warning``), or may surprise (``note``)."""

    level: str
    subject: str
    message: str


def doctor(allow_override: Iterable[str] = (), url: str | None = None) -> list[Finding]:
    """Look at the metadata first, then at what is discovered, then at other processes."""
    found = [*_stale(), *_twice()]
    plugins = discover(allow_override)
    found += [Finding("error", broken.plugin, broken.sentence()) for broken in plugins.broken]
    found += [
        *_old(plugins),
        *_needs(plugins),
        *_loads(plugins),
        *_undeclared(plugins),
        *_overrides(plugins, set(allow_override)),
        *_slow(plugins),
    ]
    found += _processes(plugins, allow_override)
    if url is not None:
        found += _server(plugins, url)
    return found


def _stale() -> Iterator[Finding]:
    """Entry points whose module is gone, and editable installs whose pyproject.toml has changed since."""
    for point in entry_points(group=GROUP):
        package = point.value.partition(":")[0].partition(".")[0]
        if find_spec(package) is None:
            owner = point.dist.name if point.dist else "?"
            yield Finding(
                "error", point.name, f"its package {package} is gone: pip install {owner} again, or uninstall it"
            )
    for owner in {point.dist.name: point.dist for point in entry_points(group=GROUP) if point.dist}.values():
        folder = _editable(owner)
        file = folder / "pyproject.toml" if folder is not None else None
        if file is None or not file.is_file():
            continue
        declared = tomllib.loads(file.read_text()).get("project", {}).get("entry-points", {}).get(GROUP)
        installed = {point.name: point.value for point in owner.entry_points if point.group == GROUP}
        if declared is not None and declared != installed:
            odd = sorted({name for name, _ in set(declared.items()) ^ set(installed.items())})
            message = f"{', '.join(odd)} changed in {file} since it was installed: pip install -e {folder} again"
            yield Finding("error", owner.name, message)


def _editable(owner: Distribution) -> Path | None:
    """The folder an editable install stands for."""
    text = owner.read_text("direct_url.json")
    given: dict[str, Any] = json.loads(text) if text else {}
    if not given.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(given["url"]).path))


def _twice() -> Iterator[Finding]:
    """One package with the metadata of two versions: which of them counts depends on the order of sys.path."""
    owners = {point.dist.name for point in entry_points(group=GROUP) if point.dist}
    versions: dict[str, Counter[str]] = {}
    for each in distributions():
        if each.name in owners:
            versions.setdefault(each.name, Counter())[each.version] += 1
    for name, counts in versions.items():
        if len(counts) > 1:
            told = " and ".join(sorted(counts))
            yield Finding(
                "error", name, f"is installed in versions {told}: uninstall it until it is gone, then install it"
            )


def _old(plugins: PluginSet) -> Iterator[Finding]:
    for item in plugins.all():
        if item.age is not None:
            yield Finding("warning", item.key, item.age)


def _needs(plugins: PluginSet) -> Iterator[Finding]:
    for item in plugins.all():
        refusal = item.declaration.needs.refusal(Host(device=item.declaration.needs.device or "cpu"))
        if refusal is not None and "package" in refusal:
            yield Finding("note", item.key, refusal)


def _loads(plugins: PluginSet) -> Iterator[Finding]:
    """What third parties' declarations name and ``fwk serve`` would fail to import, in its words."""
    for item in plugins.all():
        needs = item.declaration.needs
        if item.package == OWN or needs.refusal(Host(device=needs.device or "cpu")) is not None:
            continue
        values = [str(getattr(item.declaration, field.name)) for field in fields(item.declaration)]
        for place in filter(PLACE.fullmatch, values):
            try:
                found = load_object(item, place)
            except PluginLoadError as error:
                yield Finding("error", item.key, str(error))
            else:
                if not callable(found):
                    kind = type(found).__name__
                    yield Finding(
                        "error", item.key, f"plugin {item.source}: {place} makes nothing: it is of type {kind}"
                    )


def _undeclared(plugins: PluginSet) -> Iterator[Finding]:
    """Functions that are called like a hook, defined where hooks are, and lack ``@hookimpl``."""
    for label, plugin in plugins.manager.list_name_plugin():
        own = {caller.name for caller in plugins.manager.get_hookcallers(plugin) or ()}
        for family in FAMILIES.values():
            found = vars(plugin).get(family.hook)
            here = getattr(found, "__module__", None) == getattr(plugin, "__name__", "") and isfunction(found)
            if here and family.hook not in own and not label.endswith(f" of {OWN}"):
                yield Finding("warning", label, f"its function {family.hook} lacks @hookimpl, and so declares nothing")


def _overrides(plugins: PluginSet, allowed: set[str]) -> Iterator[Finding]:
    taken = {item.key for item in plugins.overridden}
    for item in plugins.overridden:
        mine = plugins.by_family[item.family][item.name]
        why = "--allow-override" if item.key in allowed else "its declaration"
        yield Finding("note", item.key, f"{mine.source} is used instead of {item.source}, as {why} says")
    for key in sorted(allowed - taken):
        yield Finding(
            "warning", key, "--allow-override names it, but no installed plugin takes its place: leave it out"
        )
    for item in plugins.all():
        if item.declaration.override and item.key not in taken:
            yield Finding("note", item.key, f"{item.source} may override a plugin of that name, but there is no other")


def _slow(plugins: PluginSet) -> Iterator[Finding]:
    for name, seconds in plugins.load_seconds.items():
        if seconds > SLOW_SECONDS:
            yield Finding("note", name, f"takes {seconds * 1000:.0f} ms to declare: does it import something heavy?")


def _processes(plugins: PluginSet, allow_override: Iterable[str]) -> Iterator[Finding]:
    """Engines and workers are started like this: with this interpreter and this environment, not with this process."""
    code = "import sys; from fwk.plugins import discover; print(discover(sys.argv[1:]).fingerprint)"
    words = [sys.executable, "-c", code, *allow_override]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    other = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or other != plugins.fingerprint:
        told = done.stderr.strip().rpartition("\n")[2] if done.returncode else f"sees the set {other}"
        message = (
            f"another process {told}, this one the set {plugins.fingerprint}: something changes sys.path in only one"
        )
        yield Finding("error", "processes", message)


def _server(plugins: PluginSet, url: str) -> Iterator[Finding]:
    """A running server's set against this environment's."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: must begin with http:// or https://")
    try:
        with open_here(urllib.request.Request(url.rstrip("/") + "/server_info"), INFO_SECONDS) as reply:
            info = json.loads(b"".join(pieces_of(reply, Allowance(MAX_INFO_BYTES, INFO_SECONDS))))
            if not isinstance(info, dict):
                raise ValueError("it is no server of fwk")
    except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:
        yield Finding("error", url, f"cannot be asked for its plugins: {error}")
        return
    if info.get("fingerprint") == plugins.fingerprint:
        return
    here = {f"{item.key} {item.package} {item.version}" for item in plugins.all()}
    there: set[str] = set(info.get("plugins", []))
    odd = [f"only here: {row}" for row in sorted(here - there)] + [f"only there: {row}" for row in sorted(there - here)]
    yield Finding(
        "error", url, f"runs another set of plugins ({'; '.join(odd) or 'the same names, other code'}): restart it"
    )


def report(findings: list[Finding], as_json: bool) -> int:
    """Print; the exit code says whether there is an error."""
    errors = sum(finding.level == "error" for finding in findings)
    if as_json:
        print(json.dumps({"errors": errors, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.level:<8} {finding.subject}: {finding.message}")
        print(f"{errors} errors, {len(findings) - errors} other findings" if findings else "all is well")
    return 1 if errors else 0
