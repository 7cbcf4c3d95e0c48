"""A resolved set of plugins on file, and whether a process sees the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from fwk.errors import ConfigError
from fwk.plugins.discovery import GROUP, OWN, PluginSet, with_packages
from fwk.plugins.families import NAMED
from fwk_files.regular import open_regular, read_text

FIELDS = ("package", "version", "api", "load")
MAX_FILES = 20_000
"""Of one package: what has more is not hashed, and so cannot be locked."""


def frozen(plugins: PluginSet) -> dict[str, Any]:
    """What ``fwk plugins freeze`` writes: every declaration and where it came from, the set's fingerprint, and a hash
    of each package's files. Raises ``ConfigError`` for a package that has too many.
    """
    rows = {
        item.key: {
            "package": item.package,
            "version": item.version,
            "api": item.api,
            "load": item.declaration.load,
        }
        for item in plugins.all()
    }
    return {"fingerprint": plugins.fingerprint, "plugins": rows, "files": hashes(plugins)}


def hashes(plugins: PluginSet) -> dict[str, str]:
    """SHA-256 of the files of each package's modules that declare or hold plugins, by package."""
    modules: dict[str, set[str]] = {}
    for item in plugins.all():
        modules.setdefault(item.package, set()).add(item.declaration.load.partition(":")[0].partition(".")[0])
    for point, package, _ in with_packages(entry_points(group=GROUP)):
        if package in modules:
            modules[package].add(point.value.partition(":")[0].partition(".")[0])
    return {package: _hash(package, names) for package, names in sorted(modules.items())}


def _hash(package: str, modules: set[str]) -> str:
    """Of names and content; what the interpreter keeps of them (``__pycache__``) is left out."""
    total, count = hashlib.sha256(), 0
    for module in sorted(modules):
        try:
            spec = find_spec(module)
        except (ImportError, ValueError):  # it is not to be found, or was made by hand
            spec = None
        folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
        single = [Path(spec.origin)] if spec is not None and not folders and spec.origin is not None else []
        for path in sorted([*single, *(path for folder in folders for path in folder.rglob("*") if path.is_file())]):
            root = next((folder for folder in folders if path.is_relative_to(folder)), path.parent)
            name = path.relative_to(root)
            if "__pycache__" in name.parts:
                continue
            count += 1
            if count > MAX_FILES:
                raise ConfigError(f"package {package} has more than {MAX_FILES} files, and cannot be locked")
            with open_regular(path) as file:
                total.update(f"{module}/{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def check_lock(path: str, plugins: PluginSet) -> list[str]:
    """Raise ``ConfigError`` naming every difference, unless ``plugins`` are those of the file.

    Returns those that the file names, of families where that turns them on (``family.name``).
    """
    try:
        locked: dict[str, Any] = json.loads(read_text(path))
        rows = cast(dict[str, dict[str, Any]], dict(locked["plugins"]))
        files = cast(dict[str, str], dict(locked.get("files", {})))  # none in one of before they were hashed
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"--plugins-lock {path}: not a file that 'fwk plugins freeze' wrote: {error}") from None
    here = frozen(plugins)
    found = differences(rows, here["plugins"]) + changed_files(files, here["files"])
    if found or locked.get("fingerprint") != plugins.fingerprint:
        told = "; ".join(found) or "the fingerprints differ"
        raise ConfigError(
            f"--plugins-lock {path}: {told}. Install what was locked, or write the file anew with 'fwk plugins freeze'"
        )
    return [item.key for item in plugins.all() if item.family in NAMED and item.package != OWN and item.key in rows]


def changed_files(locked: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """A phrase for each package whose files are not those that were locked."""
    return [f"files of {package} have changed" for package in sorted(locked) if here.get(package) != locked[package]]


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
