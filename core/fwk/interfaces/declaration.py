"""What every plugin declares: a name, how to load it, what it needs, what it offers.

Declarations are light, frozen data. The object itself is imported only once it has been selected.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from packaging.requirements import Requirement

from fwk.config import EngineOptions, Options
from fwk.types import ModelConfig
from fwk_deprecated import follow_renamed_methods


@dataclass(frozen=True, slots=True)
class Host:
    """The machine a plugin would run on.

    - ``device``: the name of its plugin (``DeviceSpec``)
    - ``compute_capability``: of a CUDA device, (major, minor); None: it has none.
    - ``cpu_flags``: instruction sets, as /proc/cpuinfo names them.
    - ``lacks``: precisions that the device cannot compute in
    """

    device: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    cpu_flags: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run when plugins are chosen; each family reads the part it depends on.

    - ``host``: the machine.
    - ``dtype``: of activations, by torch's name.
    - ``kv_dtype``: how K/V are kept (``--kv-cache-dtype``); ``auto``: as ``dtype``.
    - ``head_size``: of the model's attention, before it is divided over ranks; 0: not known yet. So for the next two.
    - ``num_heads``: query heads.
    - ``num_kv_heads``: K/V heads.
    - ``block_size``: tokens in a block of the KV cache (``--page-size``).
    - ``architecture``: as config.json names it; empty: not known yet.
    - ``tp_size``: ranks of the tensor-parallel group.
    - ``pp_size``: stages that the model's layers are divided into, each with such a group.
    - ``ep_size``: by how many ranks the experts of a layer are divided; 1: not at all.
    - ``features``: abilities that this run cannot do without, in the words of ``AttentionBackendSpec.features``.
    - ``task``: what the model is for (``ModelSpec.task``).
    - ``layouts``: how the checkpoint's weights are stored, in the words of ``QuantizerSpec.layouts``.
    - ``drafts``: the shape of the drafts that are verified; empty while the decoder is not chosen.
    - ``is_deterministic``: whether a sequence's numbers must be the same to the bit whatever is computed alongside.
    - ``model``: the served model's configuration.
    - ``chosen``: names of what other families have in use so far; empty for a family that is not used.
    """

    host: Host = Host()
    dtype: str = "float32"
    kv_dtype: str = "auto"
    head_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    block_size: int = 16
    architecture: str = ""
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    features: frozenset[str] = frozenset()
    task: str = ""
    layouts: tuple[str, ...] = ()
    drafts: Literal["none", "chain", "tree", ""] = "none"
    is_deterministic: bool = False
    model: ModelConfig | None = None
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def value(self, name: str) -> tuple[object, ...] | None:
        """What ``Limit.fact`` is called by ``name``; ``("none",)`` of a family that is not used, None while unknown."""
        if name == "device":
            return (self.host.device,)
        if name in _FACTS:
            return (getattr(self, name),) if getattr(self, name) else None
        chosen = self.chosen.get(name)
        return None if chosen is None else chosen or ("none",)


DETERMINISTIC = "deterministic"
"""Among ``Declaration.offers``: a sequence gets the same numbers, to the bit, whatever else a step computes, and
however its tokens are divided into steps. Declarations that hold it in some runs only say so in ``refusal``."""

INVARIANT = "invariant"
"""Among ``Declaration.offers``: what ``deterministic`` promises, in runs that do not ask for it, too."""

_FACTS = frozenset(item.name for item in fields(Facts)) - {
    "host",
    "features",
    "layouts",
    "is_deterministic",
    "model",
    "chosen",
}
LIMITED = _FACTS | {"device"}
"""The facts that a ``Limit`` can name, alongside the families."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on the runs a plugin can serve.

    fact: one of ``LIMITED`` (``dtype``, ``kv_dtype``, ``block_size``, ``tp_size``, ``drafts``, ...), or a family: then
        the name of what is chosen from it, ``none`` when the run uses nothing of it.
    values: those it can serve.
    why: the reason, for the sentence.
    """

    fact: str
    values: tuple[object, ...]
    why: str = ""

    def refusal(self, facts: Facts) -> str | None:
        """Why a run is out of bounds; None when it is not, or when that is not known yet."""
        found = facts.value(self.fact)
        outside = [value for value in found or () if value not in self.values]
        if not outside:
            return None
        reason = f": {self.why}" if self.why else ""
        return f"serves {self.fact} {' or '.join(map(str, self.values))} only, not {outside[0]}{reason}"


@dataclass(frozen=True, slots=True)
class Ask:
    """Abilities a plugin needs of what is chosen from another family, in the words of that family's ``abilities``.

    - ``family``: whose choice it is.
    - ``features``: all of them are needed.
    """

    family: str
    features: frozenset[str]


@dataclass(frozen=True, slots=True)
class Needs:
    """Conditions of the machine and the environment.

    - ``device``: name of a device plugin; None: any.
    - ``packages``: Python requirements (PEP 508) that must be installed.
    - ``compute_capability``: the lowest, (major, minor); None: any.
    - ``cpu_flags``: instruction sets that the CPU must have, as /proc/cpuinfo names them.
    - ``dtypes``: precisions it computes in, whatever the model's
    """

    device: str | None = None
    packages: tuple[str, ...] = ()
    compute_capability: tuple[int, int] | None = None
    cpu_flags: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

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
        unknown = [dtype for dtype in self.dtypes if dtype in host.lacks]
        if unknown:
            return f"computes in {', '.join(unknown)}, which a {host.device} device cannot"
        for text in self.packages:
            requirement = _requirement(text)
            try:
                version = installed_version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                return f"needs the package {text}: pip install '{text}'"
            if not requirement.specifier.contains(version, prereleases=True):
                return f"needs {text}, but {version} is installed: pip install '{text}'"
        return None


_requirement = cache(Requirement)


@cache
def installed_version(package: str) -> str:
    """The version of an installed package, read once in a process: plugins are asked many times over what they need.

    Raises ``PackageNotFoundError``, which is not remembered.
    """
    return importlib.metadata.version(package)


TOUCHES: Mapping[str, str] = {
    "files": "writes, renames or deletes files",
    "network": "opens sockets, or looks names up",
    "processes": "starts processes",
    "requests": "reads the text of requests that did not ask for it",
    "routes": "adds routes to the server",
}
"""What ``Declaration.touches`` may hold, and what each means. The first three are watched (``fwk.plugins.audit``)."""

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
    disabled_by: names among these options that turn it off when they are set.
    api: the family's API version the plugin was written for (``fwk.plugins.VERSIONS`` has the newest of each).
    override: takes the name of a built-in; another package's, if the user also says ``--allow-override FAMILY.NAME``.
    switches: flags without a value that select it, for families that an option chooses from.
    limits: bounds on the run, on the facts of any family.
    asks: abilities it needs of other families' choices.
    offers: abilities that others may ask of it.

    - ``family``: the family of all such declarations; set by each ``*Spec``.
    - ``summary``: one line for ``fwk plugins list``.
    - ``touches``: what the plugin's own code does besides answering core, of ``TOUCHES``, for its users to know; what a
      plugin of another package touches undeclared is in the log, and refused with ``--strict``.
    - ``kernels``: C++ sources that it builds on first use (``fwk_native``); a server begins with them while it fetches.
    """

    family: ClassVar[str] = ""

    name: str
    load: str
    needs: Needs = Needs()
    rank: int = 0
    options: type[Options] | None = None
    enabled_by: tuple[str, ...] = ()
    disabled_by: tuple[str, ...] = ()
    api: int = 1
    override: bool = False
    switches: tuple[str, ...] = ()
    summary: str = ""
    touches: frozenset[str] = frozenset()
    limits: tuple[Limit, ...] = ()
    asks: tuple[Ask, ...] = ()
    offers: frozenset[str] = frozenset()
    kernels: tuple[Path, ...] = ()

    def __init_subclass__(cls, **words: Any) -> None:
        super().__init_subclass__(**words)
        follow_renamed_methods(cls, {"reluctance": "auto_skip_reason"})

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{type(self).__name__}: {self.name!r} is not a plugin name (lower case, digits, _ . -)")
        if ":" not in self.load:
            raise ValueError(f"{type(self).__name__} {self.name!r}: load must be 'module:attribute', not {self.load!r}")
        options = cast(object, self.options)
        if options is not None and not (isinstance(options, type) and issubclass(options, Options)):
            raise TypeError(f"{type(self).__name__} {self.name!r}: options must be a subclass of fwk.Options")
        if not self.touches <= TOUCHES.keys():
            words = ", ".join(sorted(self.touches - TOUCHES.keys()))
            raise ValueError(f"{type(self).__name__} {self.name!r}: touches {words}; there are {', '.join(TOUCHES)}")
        for what, names in (("enabled_by", self.enabled_by), ("disabled_by", self.disabled_by)):
            unknown = set(names) - set(self.options.model_fields if self.options is not None else ())
            if unknown:
                raise ValueError(f"{type(self).__name__} {self.name!r}: {what} names no option of its own: {unknown}")

    def variance(self, facts: Facts) -> str | None:
        """Why a sequence's numbers may depend on what else a step computes, as a predicate; None where they do not."""
        if INVARIANT in self.offers:
            return self.refusal(replace(facts, is_deterministic=True))
        asked = " unless --enable-deterministic-inference asks it to" if DETERMINISTIC in self.offers else ""
        return f"does not promise the same numbers whatever is computed alongside{asked}"

    def refusal(self, facts: Facts) -> str | None:
        """Why this plugin cannot serve the run described by ``facts``, in one sentence; None when it can.

        Asked more than once while plugins are chosen, each time with more facts: a refusal is never taken back.
        """
        bound = next((why for limit in self.limits if (why := limit.refusal(facts)) is not None), None)
        return bound or self.needs.refusal(facts.host)

    def conflict(self, options: Any, engine: EngineOptions) -> str | None:
        """What of its own options, validated, does not go with core's, in a sentence; None: nothing.

        Asked when options are read, of a plugin for which some were given.
        """
        return None

    def auto_skip_reason(self, facts: Facts) -> str | None:
        """Why ``auto`` leaves this plugin alone although it could serve the run; None when it does not."""
        return None

    def is_meant_for(self, facts: Facts) -> bool:
        """Whether the run is of the kind this plugin is for: if not, doing without it is no fallback."""
        return True

    def abilities(self) -> frozenset[str]:
        """What others may ask of this plugin (``Ask.features``)."""
        return self.offers

    def asks_of(self, facts: Facts, options: Any) -> tuple[Ask, ...]:
        """What it asks of other families' choices in such a run; ``options``: its own, validated."""
        return self.asks

    def facts_with(self, facts: Facts, options: Any) -> Facts:
        """The facts of a run in which this plugin takes part."""
        asked = frozenset[str]().union(
            *(ask.features for ask in self.asks_of(facts, options) if ask.family == "attention")
        )
        return replace(facts, features=facts.features | asked) if asked else facts


class InterpretedKernels(Declaration):
    """Mixed into a declaration: kernels for one kind of device that an interpreter runs anywhere, slowly, where asked.

    on_device: the kind of device, and what else they need of it. interpreter: the environment variable that asks by 1.
    """

    on_device: ClassVar[Needs]
    interpreter: ClassVar[str]

    def refusal(self, facts: Facts) -> str | None:
        return self.why_no_kernels(facts.host) or super().refusal(facts)

    def why_no_kernels(self, host: Host) -> str | None:
        """Why they do not run on ``host``; None where they do, perhaps in the interpreter."""
        device = self.on_device.device
        if host.device == device:
            return self.on_device.refusal(host)
        if os.environ.get(self.interpreter) != "1":
            return f"needs a {device} device, or {self.interpreter}=1 to run its kernels in a slow interpreter"
        return None
