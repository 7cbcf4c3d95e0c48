"""Load every installed plugin's declarations, one plugin at a time, so that a broken one harms nobody else."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

import pluggy

from fwk import hookspecs
from fwk.config import EngineOptions, ModelOptions, Options, PluginOptions, ServerOptions, aliases_of
from fwk.errors import PluginError, one_line
from fwk.interfaces.declaration import LIMITED, Declaration
from fwk.plugins.families import FAMILIES, ORDER, PARTS, VERSIONS, closest
from fwk.plugins.fitting import guard_questions, misfit
from fwk.plugins.versions import Adapter, ApiVersion

GROUP = "fwk"
OWN = "fwk"
"""The package of the built-ins."""

_CORE = (EngineOptions, ModelOptions, ServerOptions, PluginOptions)

MAX_ERROR = 500
"""Characters of what a broken plugin says."""

SLOW_SECONDS = 1.0
"""A plugin that takes longer to declare itself delays every command: that is worth a warning."""


@dataclass(frozen=True, slots=True)
class Registered:
    """One declaration and where it came from.

    declaration: as of the family's newest API version. ``adapter`` made it so, and is for its object too, when the
    plugin was written for an older one, ``api``.
    """

    declaration: Declaration
    plugin: str  # the entry point's name: family.name
    package: str
    version: str
    api: int = 1
    adapter: Adapter | None = None

    @property
    def family(self) -> str:
        return self.declaration.family

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def key(self) -> str:
        """``family.name``: how options and overrides refer to it."""
        return f"{self.family}.{self.name}"

    @property
    def label(self) -> str:
        """For messages that say what family it is of: name, package and version."""
        return f"{self.name!r} ({self.package} {self.version})"

    @property
    def source(self) -> str:
        """For messages: name, package and version."""
        return f"'{self.plugin}' from {self.package} {self.version}"

    @property
    def age(self) -> str | None:
        """A sentence about a plugin of an older API version; None for one of the newest."""
        if self.adapter is None:
            return None
        return (
            f"plugin {self.source} was written for version {self.api} of the {self.family} interface and is adapted to "
            f"version {self.declaration.api}; fwk {self.adapter.retires} will refuse it"
        )


@dataclass(frozen=True, slots=True)
class Broken:
    """A plugin that could not be had: all of it, or one declaration whose name another package has.

    keys: what it declares of that (``family.name``), as far as that is known.
    """

    plugin: str
    package: str
    version: str
    stage: str  # import, declare, name, start
    error: str
    keys: tuple[str, ...] = ()

    def is_called(self, name: str) -> bool:
        """Whether ``name`` may mean it: a name, ``family.name`` or a package."""
        keys = (self.plugin, *self.keys)
        return name in (*keys, *(key.partition(".")[2] for key in keys), self.plugin.rpartition(".")[2], self.package)

    def sentence(self) -> str:
        if self.stage in ("name", "start"):
            return self.error
        return f"plugin '{self.plugin}' from {self.package} {self.version} failed to {self.stage}: {self.error}"


@dataclass(slots=True)
class PluginSet:
    """Everything installed, resolved once per process. Passed around; never a global."""

    manager: pluggy.PluginManager
    versions: Mapping[str, ApiVersion] = field(default_factory=lambda: VERSIONS)
    by_family: dict[str, dict[str, Registered]] = field(default_factory=dict[str, dict[str, Registered]])
    broken: list[Broken] = field(default_factory=list[Broken])
    overridden: list[Registered] = field(default_factory=list[Registered])
    load_seconds: dict[str, float] = field(default_factory=dict[str, float])
    undeclared: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """What a package's code has done in this process that its declarations do not say: a sentence each."""

    def family(self, family: str) -> list[Registered]:
        """Declarations of a family, by name."""
        return sorted(self.by_family.get(family, {}).values(), key=lambda item: item.name)

    def all(self) -> list[Registered]:
        """Every declaration, by family and name."""
        return [item for family in FAMILIES for item in self.family(family)]

    @property
    def left_out(self) -> list[str]:
        """What this process does without since it failed to start, a sentence each."""
        return [broken.error for broken in self.broken if broken.stage == "start"]

    @property
    def fingerprint(self) -> str:
        """Equal in two processes exactly when they see the same plugins in the same versions."""
        lines = sorted(f"{item.key} {item.declaration.load} {item.package} {item.version}" for item in self.all())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def register(
        self, plugin: object, name: str, package: str, version: str, allow_override: Iterable[str] = ()
    ) -> None:
        """Register one plugin object: all of its declarations but those whose name another package keeps.

        One that is registered already (a module with several entry points) declares nothing more: what is called like
        the entry point is known by it from then on. Raises ``PluginError`` when it declares a name twice, ``Exception``
        of any kind when it is broken otherwise; what it declares is then in the exception's ``keys``, where known.
        """
        if self.manager.is_registered(plugin):
            family, _, own = name.partition(".")
            item = self.by_family.get(family, {}).get(own)
            if item is not None and item.package == package:
                self.by_family[family][own] = replace(item, plugin=name)
            return
        label = f"{name} of {package}"
        if self.manager.has_plugin(label):
            label += f" ({id(plugin)})"
        keys: tuple[str, ...] = ()
        self.manager.register(plugin, name=label)
        try:
            found = self._declarations(plugin)
            keys = tuple(f"{item.family}.{item.name}" for item in found)
            declared = [self._adapted(item, name, package, version) for item in found]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise PluginError(f"declares {twice} twice")
        except BaseException as error:
            self.manager.unregister(name=label)
            error.keys = keys  # type: ignore[attr-defined]
            raise
        for item in declared:
            self._place(item, set(allow_override))

    def _place(self, item: Registered, allowed: set[str]) -> None:
        """Enter a declaration under its name, unless another package keeps that."""
        names = self.by_family.setdefault(item.family, {})
        other = names.get(item.name)
        clash = self._clash(item, other)
        if clash is not None:
            self.broken.append(Broken(item.plugin, item.package, item.version, "name", clash, (item.key,)))
            return
        if other is not None:
            error = _contest(item, other, is_allowed=item.key in allowed)
            if error is not None:
                self.broken.append(Broken(item.plugin, item.package, item.version, "name", error, (item.key,)))
                return
            self.overridden.append(other)
        names[item.name] = item

    def _clash(self, item: Registered, replaced: Registered | None) -> str | None:
        """Why an option of another package's plugin means something else already, and the remedy; None: none does.

        Two plugins may share an option that both declare alike.
        """
        words = {} if item.package == OWN else _words(item.declaration.options)
        if not words:
            return None
        others = [one for one in self.all() if one is not replaced and one.key != item.key]
        known = [("fwk itself", False, _words(model)) for model in _CORE]
        known += [(other.source, True, _words(other.declaration.options)) for other in others]
        for whose, may_share, theirs in known:
            for word in words.keys() & theirs.keys():
                if words[word] != theirs[word] or not may_share:
                    option = "--" + word.replace("_", "-")
                    return (
                        f"option {option} is declared by {whose} and by {item.source}, which cannot be used: rename it "
                        f"there, or uninstall {item.package}"
                    )
        return None

    def contested(self, key: str) -> str | None:
        """Why it is undecided which plugin is meant by ``family.name``, and the remedy; None: one has the name."""
        return next((broken.error for broken in self.broken if broken.stage == "name" and key in broken.keys), None)

    def _declarations(self, plugin: object) -> list[Declaration]:
        found: list[Declaration] = []
        callers = self.manager.get_hookcallers(plugin)
        if not callers:
            bare = [family.hook for family in FAMILIES.values() if callable(getattr(plugin, family.hook, None))]
            raise TypeError(f"declares nothing: @hookimpl belongs before {', '.join(bare) or 'a function of it'}")
        for caller in callers:
            if caller.spec is None:
                known = sorted(family.hook for family in FAMILIES.values())
                hint = closest(caller.name, known)
                raise TypeError(f"implements unknown hook {caller.name!r}{hint}; hooks: {', '.join(known)}")
            spec = next(family.spec for family in FAMILIES.values() if family.hook == caller.name)
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin:
                    found.extend(_checked(impl.function(), caller.name, spec))
        return found

    def _adapted(self, item: Declaration, plugin: str, package: str, version: str) -> Registered:
        wrong = None if package == OWN else misfit(item)
        if item.name == "auto" or (item.name == "none" and FAMILIES[item.family].has_none):
            wrong = "has a name that means something else to its option"
        if wrong is not None:
            raise TypeError(f"{FAMILIES[item.family].noun} {item.name!r:.100} {wrong}")
        if package != OWN:
            guard_questions(item, f"{FAMILIES[item.family].noun} {item.name!r} ({package} {version})")
        known = self.versions[item.family]
        refusal = known.refusal(item.family, item.name, package, item.api)
        if refusal is not None:
            raise TypeError(refusal)
        declaration, adapter = known.adapt(item)
        _check_terms(declaration)
        return Registered(declaration, plugin, package, version, item.api, adapter)


@cache
def _words(options: type[Options] | None) -> dict[str, tuple[str, str]]:
    """By each word that sets one of these options: which, and what it is."""
    return {
        word.strip("-").replace("-", "_"): (name, repr(field))
        for name, field in (options.model_fields if options is not None else {}).items()
        for word in (name, *aliases_of(field))
    }


def _contest(item: Registered, other: Registered, *, is_allowed: bool) -> str | None:
    """Why ``item`` does not take the name of ``other``, and the line to add; None when it does.

    A built-in gives way to a plugin that overrides, or that the operator allows to; another package's only to both.
    """
    is_ours, says = other.package == OWN, item.declaration.override
    if (is_allowed and (says or is_ours)) or (says and is_ours):
        return None
    if is_ours:
        spec = type(item.declaration).__name__
        hint = (
            f"say --allow-override {item.key} to use that of {item.package}, whose author can say override=True in its "
            f"{spec} instead, or uninstall {item.package}"
        )
    else:
        hint = f"say --allow-override {item.key} to prefer it" if says else "uninstall one of the two packages"
    noun = FAMILIES[item.family].noun
    return f"{noun} {item.name!r} is declared by {other.source} and by {item.source}; {hint}"


def _checked(answer: object, hook: str, spec: type[Declaration]) -> list[Declaration]:
    if not isinstance(answer, list):
        raise TypeError(f"{hook} must return a list, not {type(answer).__name__}")
    for item in answer:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(item, spec):
            raise TypeError(f"{hook} must return {spec.__name__} objects, not {type(item).__name__}")  # pyright: ignore[reportUnknownArgumentType]
    return answer  # pyright: ignore[reportUnknownVariableType]


def _check_terms(item: Declaration) -> None:
    """Refuse limits and asks about what is never negotiated, or of those nobody negotiates with: they bound nothing."""
    if (item.limits or item.asks) and item.family not in (*ORDER, *PARTS):
        raise TypeError(
            f"{item.name!r} has {'limits' if item.limits else 'asks'}, but a {FAMILIES[item.family].noun} is not "
            "settled together with others: it can have needs, of the machine and of packages"
        )
    for limit in item.limits:
        if limit.fact not in LIMITED | set(ORDER):
            raise TypeError(
                f"{item.name!r} has a limit on {limit.fact!r}, which no run has"
                f"{closest(limit.fact, LIMITED | set(ORDER))}: there are "
                f"{', '.join(sorted(LIMITED))}, and the families {', '.join(ORDER)}"
            )
    for ask in item.asks:
        if ask.family not in ORDER:
            hint, known = closest(ask.family, ORDER), ", ".join(ORDER)
            raise TypeError(f"{item.name!r} asks something of {ask.family!r}{hint}, which is none of {known}")


def discover(
    allow_override: Iterable[str] = (),
    points: Iterable[EntryPoint] | None = None,
    warn: Callable[[str], None] | None = None,
    versions: Mapping[str, ApiVersion] = VERSIONS,
) -> PluginSet:
    """Load all entry points of group ``fwk``. What is wrong with one of them is in ``PluginSet.broken``."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    plugins = PluginSet(manager, versions)
    found = with_packages(entry_points(group=GROUP) if points is None else points)
    # Packages that override come last, whatever the order of installation.
    for point, package, version in sorted(found, key=lambda item: (item[1] != OWN, item[0].name)):
        started, cpu = time.perf_counter(), time.thread_time()
        stage, known = "import", len(plugins.broken)
        try:
            if not EntryPoint.pattern.match(point.value):
                raise ValueError(f"its entry point {point.value!r} names no module: mend its metadata, or uninstall it")
            module: Any = point.load()
            stage = "declare"
            plugins.register(module, point.name, package, version, allow_override)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, and what else is no Exception
            said = one_line(error, MAX_ERROR)
            plugins.broken.append(Broken(point.name, package, version, stage, said, getattr(error, "keys", ())))
        if warn is not None:
            for broken in plugins.broken[known:]:
                warn(broken.sentence())
        seconds = time.perf_counter() - started
        plugins.load_seconds[point.name] = time.thread_time() - cpu  # what else the machine does is not counted
        if seconds > SLOW_SECONDS and warn is not None:
            warn(
                f"plugin '{point.name}' from {package} {version} took {seconds:.1f} s to declare itself, and so delays "
                "every command: what is slow belongs into the module its declarations name"
            )
    return plugins


def with_packages(points: Iterable[EntryPoint]) -> Iterator[tuple[EntryPoint, str, str]]:
    """Each with its package's name and version. Every look at a package parses its whole metadata, so it gets one."""
    known: dict[int, tuple[str, str]] = {}
    for point in points:
        number = id(point.dist)
        if number not in known:
            known[number] = _package(point.dist)
        yield point, *known[number]


def _package(dist: Distribution | None) -> tuple[str, str]:
    try:
        return ("?", "?") if dist is None else (dist.name or "?", dist.version or "?")
    except Exception:  # metadata that lack a field, or are damaged in ways each Python raises something else for
        return "?", "?"
