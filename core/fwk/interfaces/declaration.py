"""What every plugin declares: a name, how to load it, what it needs, what it offers.

Declarations are light, frozen data. The object itself is imported only once it has been selected.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import ClassVar

from packaging.requirements import Requirement

from fwk.config import Options


@dataclass(frozen=True, slots=True)
class Host:
    """The machine a plugin would run on."""

    device: str = "cpu"  # "cpu" or "cuda"
    compute_capability: tuple[int, int] | None = None
    cpu_flags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run when plugins are chosen; each family reads the part it depends on."""

    host: Host = Host()
    dtype: str = "float32"
    kv_dtype: str = "auto"
    head_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    block_size: int = 16
    architecture: str = ""
    tp_size: int = 1
    features: frozenset[str] = frozenset()
    """Abilities that this run cannot do without, in the words of ``AttentionBackendSpec.features``."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Conditions of the machine and the environment."""

    device: str | None = None
    packages: tuple[str, ...] = ()
    compute_capability: tuple[int, int] | None = None
    cpu_flags: tuple[str, ...] = ()

    def refusal(self, host: Host) -> str | None:
        """Why these needs are not met on ``host``, and what would meet them; None when they are."""
        if self.device is not None and self.device != host.device:
            return f"needs a {self.device} device, this run uses {host.device}"
        if self.compute_capability is not None and (host.compute_capability or (0, 0)) < self.compute_capability:
            major, minor = self.compute_capability
            return f"needs compute capability {major}.{minor} or newer, this device has {host.compute_capability}"
        missing = [flag for flag in self.cpu_flags if flag not in host.cpu_flags]
        if missing:
            return f"needs a CPU with {', '.join(missing)}"
        for text in self.packages:
            requirement = Requirement(text)
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                return f"needs the package {text}: pip install '{text}'"
            if not requirement.specifier.contains(version, prereleases=True):
                return f"needs {text}, but {version} is installed: pip install '{text}'"
        return None


_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The base of every ``*Spec``.

    name: how users select it (``--attention-backend NAME``); unique in its family.
    load: ``"package.module:attribute"``, imported only when selected.
    needs: conditions of machine and environment.
    rank: ``auto`` takes the highest rank among those possible.
    options: the plugin's own options; they become flags, YAML keys, help and documentation.
    enabled_by: names among these options, in a family of which every installed plugin takes part: this one is off, and
        what ``load`` names is not imported, until one of them is set.
    api: the family's API version the plugin was written for (``fwk.plugins.VERSIONS`` has the newest of each).
    override: may take a name another package has, if the user also says ``--allow-override FAMILY.NAME``.
    switches: flags without a value that select it, for families that an option chooses from.
    """

    family: ClassVar[str] = ""

    name: str
    load: str
    needs: Needs = Needs()
    rank: int = 0
    options: type[Options] | None = None
    enabled_by: tuple[str, ...] = ()
    api: int = 1
    override: bool = False
    switches: tuple[str, ...] = ()
    summary: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{type(self).__name__}: {self.name!r} is not a plugin name (lower case, digits, _ . -)")
        if ":" not in self.load:
            raise ValueError(f"{type(self).__name__} {self.name!r}: load must be 'module:attribute', not {self.load!r}")
        unknown = set(self.enabled_by) - set(self.options.model_fields if self.options is not None else ())
        if unknown:
            raise ValueError(f"{type(self).__name__} {self.name!r}: enabled_by names no option of its own: {unknown}")

    def refusal(self, facts: Facts) -> str | None:
        """Why this plugin cannot serve the run described by ``facts``, in one sentence; None when it can."""
        return self.needs.refusal(facts.host)
