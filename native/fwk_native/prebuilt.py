"""Libraries that came with a wheel: built when the wheel was (``hatch_build.py``), so that no compiler is needed.

They are taken where the sources and flags are the ones they were built of; anything else is built on first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).with_name("prebuilt")


def find(instructions: str, name: str) -> Path | None:
    """The library of that name for an instruction set, if one came with this installation."""
    path = FOLDER / instructions / name
    return path if path.is_file() else None


def instruction_sets() -> frozenset[str]:
    """Those that libraries came for."""
    return frozenset(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else frozenset()


def build_all(sources: Iterable[Path], instructions: Iterable[str], folder: Path) -> list[Path]:
    """Build each source for each instruction set into a folder of that name in ``folder``.

    Raises ``PluginError`` where the compiler fails.
    """
    from fwk_native import build  # noqa: PLC0415 - which finds libraries by this module

    command = build.required_compiler()
    made: list[Path] = []
    for source in sources:
        for isa in instructions:
            flags = (*build.COMMON_FLAGS, *build.flags_of(isa))
            target = folder / isa / build.library_name(source, flags)
            target.parent.mkdir(parents=True, exist_ok=True)
            build.compile_library(source, target, command, flags)
            made.append(target)
    return made
