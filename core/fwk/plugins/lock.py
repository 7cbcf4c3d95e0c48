"""A resolved set of plugins on file, and whether a process sees the same."""

from __future__ import annotations

import json
from typing import Any, cast

from fwk.config.files import read_text
from fwk.errors import ConfigError
from fwk.plugins.discovery import PluginSet

FIELDS = ("package", "version", "api", "load")


def frozen(plugins: PluginSet) -> dict[str, Any]:
    """What ``fwk plugins freeze`` writes: every declaration and where it came from, and the set's fingerprint."""
    rows = {
        item.key: {
            "package": item.package,
            "version": item.version,
            "api": item.api,
            "load": item.declaration.load,
        }
        for item in plugins.all()
    }
    return {"fingerprint": plugins.fingerprint, "plugins": rows}


def check_lock(path: str, plugins: PluginSet) -> None:
    """Raise ``ConfigError`` naming every difference, unless ``plugins`` are those of the file."""
    try:
        locked: dict[str, Any] = json.loads(read_text(path))
        rows = cast(dict[str, dict[str, Any]], dict(locked["plugins"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"--plugins-lock {path}: not a file that 'fwk plugins freeze' wrote: {error}") from None
    found = differences(rows, frozen(plugins)["plugins"])
    if found or locked.get("fingerprint") != plugins.fingerprint:
        told = "; ".join(found) or "the fingerprints differ"
        raise ConfigError(
            f"--plugins-lock {path}: {told}. Install what was locked, or write the file anew with 'fwk plugins freeze'"
        )


def differences(locked: dict[str, dict[str, Any]], here: dict[str, dict[str, Any]]) -> list[str]:
    """A phrase for each plugin that is gone, new or another one."""
    found = [f"{key} ({locked[key].get('package')}) is missing" for key in sorted(set(locked) - set(here))]
    found += [f"{key} ({here[key]['package']}) is not in the file" for key in sorted(set(here) - set(locked))]
    for key in sorted(set(locked) & set(here)):
        changed = [name for name in FIELDS if locked[key].get(name) != here[key][name]]
        if changed:
            words = ", ".join(f"{name} {here[key][name]} instead of {locked[key].get(name)}" for name in changed)
            found.append(f"{key} has {words}")
    return found
