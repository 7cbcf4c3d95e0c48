"""Third-party packages for tests, as they lie in a site-packages folder: no installer runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures" / "plugins"


def write_metadata(folder: Path, name: str, points: Mapping[str, str], version: str = "1.0") -> Path:
    """What an installer leaves of a distribution: its name, its version and its entry points of fwk."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{point} = {module}" for point, module in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[fwk]", *lines, ""]))
    return folder


def write_package(folder: Path, name: str, modules: Mapping[str, str], version: str = "1.0") -> Path:
    """A distribution with modules of the given sources, each the plugin ``NAME.MODULE``."""
    folder.mkdir(parents=True, exist_ok=True)
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    return write_metadata(folder, name, {f"{name}.{module}": module for module in modules}, version)


def digest(folder: Path) -> str:
    """Of the files of a package, by name."""
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"):
        found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def import_path(*places: Path | str) -> str:
    """A PYTHONPATH with these first, and then what is on this process's: mutated sources are."""
    return os.pathsep.join([*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])])
