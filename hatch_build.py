"""Builds the kernels into a wheel where ``FWK_KERNELS`` asks for it; otherwise the wheel is pure, for every machine.

``FWK_KERNELS=all`` or a list of instruction sets (``plain avx2``), as cibuildwheel sets it (``pyproject.toml``).
"""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "FWK_KERNELS"


class KernelsHook(BuildHookInterface[Any]):
    """Adds the libraries to the wheel, which is then one of a platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the kernels. ``version`` is "editable" for an editable install, which has its sources at hand."""
        wanted = os.environ.get(VARIABLE, "").split()
        if not wanted or version == "editable":
            return
        root = Path(self.root)
        sys.path[:0] = [str(root / folder) for folder in ("errors", "native", "process")]
        from fwk_native import ISA_FLAGS, prebuilt  # noqa: PLC0415 - found once the path has it

        if wanted == ["all"]:
            wanted = list(ISA_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["plain"]
        self._folder = tempfile.TemporaryDirectory()
        sources = sorted([*root.glob("native/**/*.cpp"), *root.glob("plugins/**/*.cpp")])
        for library in prebuilt.build_all(sources, wanted, Path(self._folder.name)):
            build_data["force_include"][str(library)] = f"fwk_native/prebuilt/{library.parent.name}/{library.name}"
        build_data["pure_python"] = False
        platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform_tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built: the wheel holds it."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
