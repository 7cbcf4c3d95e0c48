"""Plugins as ``fwk plugins new`` writes them."""

from __future__ import annotations

from pathlib import Path

from fwk_kit.cli.plugin_new import package, renamed
from fwk_kit.testing.base import installed
from tests.helpers.packages import write_metadata


def install(folder: Path, family: str, name: str, change: tuple[str, str] | None = None) -> None:
    """What ``fwk plugins new`` writes, as an installer would leave it; ``change``: what is wrong with it."""
    files = dict(package(installed(), family))
    if change is not None:
        path = next((path for path in files if path.endswith(".py") and change[0] in files[path]), None)
        assert path is not None, f"{family}: {change[0]!r} is not in the template"
        files[path] = files[path].replace(*change)
    for path, text in files.items():
        if path.startswith("src/"):
            target = folder / "site" / renamed(path.removeprefix("src/"), name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(renamed(text, name))
    write_metadata(folder / "site", f"fwk-{name}", {f"{family}.{name}": f"fwk_{name}"}, "0.1.0")
    (folder / f"test_{name}.py").write_text(f"from fwk_{name}.contract import *\n")
