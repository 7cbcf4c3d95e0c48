"""Choose among the plugins of a family: by name, or ``auto`` with a reason for every refusal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fwk.config import Config, EngineOptions
from fwk.errors import ConfigError, PluginError, PluginLoadError, what_is_wrong
from fwk.interfaces.declaration import Declaration, Facts, Host, Needs
from fwk.interfaces.prefix_cache import PrefixCacheSpec
from fwk.plugins.discovery import OWN, Broken, PluginSet, Registered
from fwk.plugins.families import FAMILIES, NAMED, closest

log = logging.getLogger(__name__)

AUTO = "auto"
NOWHERE = Host()
"""For plugins of the API process, which uses no device."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plugin that was looked at, and why it was refused (None: it is possible).

    is_meant: whether the run is of the kind it is for; if not, doing without it is no fallback.
    variance: ``Declaration.variance``, of those that compute.
    """

    item: Registered
    refusal: str | None
    is_meant: bool = True
    variance: str | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome of a choice; ``chosen`` is None when nothing is possible."""

    family: str
    requested: str
    chosen: Registered | None
    candidates: list[Candidate]

    def missed(self) -> dict[str, str]:
        """Those that ``auto`` would have liked better and could not have, and why."""
        if self.requested != AUTO:
            return {}
        floor = self.chosen.declaration.rank if self.chosen else -(2**31)
        return {
            c.item.name: f"it {c.refusal}"
            for c in self.candidates
            if c.refusal is not None and c.is_meant and c.item.declaration.rank > floor
        }

    def reasons(self) -> list[str]:
        """A sentence for each of ``missed``."""
        return [f"{FAMILIES[self.family].noun} '{name}' was not taken: {why}" for name, why in self.missed().items()]

    def refusals(self) -> dict[str, str]:
        """Why each plugin that was looked at could not be had, by name."""
        return {c.item.name: f"it {c.refusal}" for c in self.candidates if c.refusal is not None}


def find(plugins: PluginSet, family: str, name: str) -> Registered:
    """The plugin of that name. Raises ``PluginError`` that says what is installed, or why it is not usable."""
    found = plugins.by_family.get(family, {}).get(name)
    if found is not None:
        return found
    for broken in plugins.broken:
        if f"{family}.{name}" in broken.keys or broken.plugin.rpartition(".")[2] == name:
            raise PluginLoadError(broken.sentence())
    noun = FAMILIES[family].noun
    installed = [item.name for item in plugins.family(family)]
    hint = closest(name, installed)
    lost = "".join(f"; {broken.sentence()}" for broken in plugins.broken if not hint)
    raise PluginError(f"unknown {noun} {name!r}{hint}; installed: {', '.join(installed) or 'none'}{lost}")


def own_name(plugins: PluginSet, family: str, requested: str) -> str:
    """The name of the plugin that is called so, here or by another server; ``requested`` when there is none."""
    items = ranked(plugins, family)
    if any(item.name == requested for item in items):
        return requested
    wanted = _plain(requested)
    for item in items:
        if wanted in map(_plain, (item.name, *getattr(item.declaration, "also_called", ()))):
            return item.name
    return requested


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char not in "-_.")


def choose(plugins: PluginSet, family: str, requested: str, facts: Facts) -> Selection:
    """Take the requested plugin, or for ``auto`` the best-ranked possible one.

    Raises ``PluginError`` when the requested plugin is unknown or refuses, or when ``auto`` finds none.
    """
    noun = FAMILIES[family].noun
    if requested != AUTO:
        item = find(plugins, family, requested)
        contest = plugins.contested(item.key)
        if contest is not None and requested != _unless_said(family):
            raise PluginError(contest)
        refusal = item.declaration.refusal(facts)
        if refusal is not None:
            raise PluginError(f"{noun} {requested!r} ({item.package}) cannot be used: it {refusal}")
        return Selection(family, requested, item, [Candidate(item, None)])
    candidates = [
        Candidate(item, item.declaration.refusal(facts), item.declaration.is_meant_for(facts))
        for item in ranked(plugins, family)
    ]
    chosen = next((c.item for c in candidates if c.refusal is None), None)
    selection = Selection(family, requested, chosen, candidates)
    if chosen is None:
        raise PluginError(none_possible(plugins, family, candidates))
    return selection


def _unless_said(family: str) -> object:
    """What is requested of a family where no option says otherwise."""
    field = EngineOptions.model_fields.get(FAMILIES[family].option or "")
    return None if field is None else field.default


def check_strict(is_strict: bool, reasons: Sequence[str]) -> None:
    """``--strict``: raise ``PluginError`` for a fallback."""
    if is_strict and reasons:
        raise PluginError(f"--strict: {'; '.join(reasons)}. Choose by name, or leave --strict out")


def ranked(plugins: PluginSet, family: str) -> list[Registered]:
    """The plugins of a family in the order ``auto`` prefers them."""
    return sorted(plugins.family(family), key=lambda item: (-item.declaration.rank, item.name))


def none_possible(plugins: PluginSet, family: str, candidates: Sequence[Candidate]) -> str:
    """The sentence for a family of which ``auto`` can have nothing."""
    why = "; ".join(f"{c.item.name} {c.refusal}" for c in candidates) or "none is installed"
    broken = [b.sentence() for b in plugins.broken if b.plugin.startswith(f"{family}.")]
    return f"no {FAMILIES[family].noun} can serve this run: {'; '.join([why, *broken])}"


def caches_with_tiers(plugins: PluginSet) -> list[str]:
    """The prefix caches that use tiers, the best-ranked first."""
    return [
        item.name
        for item in ranked(plugins, "cache")
        if isinstance(item.declaration, PrefixCacheSpec) and item.declaration.tiers is not None
    ]


def plugin_options(item: Registered, given: Mapping[str, Mapping[str, object]]) -> Any:
    """The plugin's validated options; ``given`` is ``Config.plugin_options``."""
    values = given.get(item.key, {})
    if item.declaration.options is None:
        if values:
            raise ConfigError(f"plugin {item.source} takes no options, but got {', '.join(values)}")
        return None
    try:
        return item.declaration.options.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-") if first["loc"] else item.key
        raise ConfigError(f"{flag} of {item.key}: {what_is_wrong(first)}") from None


def option_value(config: Config, plugins: PluginSet, name: str) -> Any:
    """The value, as it was given, of an option that a family names (``Family.option``, ``Family.switch``).

    It is core's, or of the plugin that declares it. None where nothing installed has it.
    """
    for part in (config.engine, config.model, config.server):
        if name in type(part).model_fields:
            return getattr(part, name)
    for item in plugins.all():
        options = item.declaration.options
        if options is not None and name in options.model_fields:
            return config.plugin_options.get(item.key, {}).get(name, options.model_fields[name].default)
    return None


def is_used(config: Config, plugins: PluginSet, family: str) -> bool:
    """Whether a run uses anything of a family, as far as its switch tells."""
    switch = FAMILIES[family].switch
    return switch is None or option_value(config, plugins, switch) not in OFF


OFF = (None, False, "false", "False")
"""What an option that turns something on is when it does not."""


def is_enabled(declaration: Declaration, given: Mapping[str, object]) -> bool:
    """Whether a plugin is turned on by its options as ``given``, or not turned off; one without switches always is.

    None, false, and what an option is when it is not given turn nothing on or off.
    """
    fields = declaration.options.model_fields if declaration.options is not None else {}

    def is_set(name: str) -> bool:
        value = given.get(name)
        return (type(value) is int or value not in OFF) and value != fields[name].default

    if any(map(is_set, declaration.disabled_by)):
        return False
    return not declaration.enabled_by or any(map(is_set, declaration.enabled_by))


def is_named(item: Registered, given: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether a plugin was asked for, where that is needed: by ``--enable-plugin``, ``--plugins-lock`` or an option.

    given: ``Config.plugin_options``, which has an entry for each that was.
    """
    return item.package == OWN or item.family not in NAMED or item.key in given


def enabled_by_name(plugins: PluginSet, name: str) -> list[Registered]:
    """The plugins that ``--enable-plugin NAME`` turns on. Raises ``PluginError`` where it turns on none."""
    known = [item for item in plugins.all() if name in (item.name, item.key, item.package) and item.package != OWN]
    found = [item for item in known if item.family in NAMED]
    if found:
        return found
    for broken in plugins.broken:
        if broken.is_called(name):
            raise PluginLoadError(f"--enable-plugin {name}: {broken.sentence()}")
    if known:
        option = FAMILIES[known[0].family].option
        how = f"select it with --{option.replace('_', '-')} {known[0].name}" if option else "nothing needs to name it"
        raise PluginError(f"--enable-plugin {name}: it is a {FAMILIES[known[0].family].noun}: {how}")
    able = [item for item in plugins.all() if item.family in NAMED and item.package != OWN]
    hint = closest(name, [word for item in able for word in (item.key, item.name, item.package)])
    installed = ", ".join(item.key for item in able) or "none"
    raise PluginError(
        f"--enable-plugin {name}: no other package has a plugin of that name{hint}; those that wait for it: {installed}"
    )


def taking_part(
    plugins: PluginSet, family: str, given: Mapping[str, Mapping[str, object]], host: Host | None = NOWHERE
) -> list[tuple[Registered, Any]]:
    """The plugins of a family that are not off, best rank first, each with its validated options.

    given: as for ``plugin_options``. host: where they run; None if they were judged already.

    Raises ``PluginError`` when one of them lacks something; a third party's that nobody asked for is left out instead.
    """
    found: list[tuple[Registered, Any]] = []
    for item in sorted(plugins.family(family), key=lambda item: -item.declaration.rank):
        if not is_named(item, given) or not is_enabled(item.declaration, given.get(item.key, {})):
            continue
        refusal = item.declaration.needs.refusal(host) if host is not None else None
        if refusal is not None:
            error = PluginError(f"{FAMILIES[family].noun} {item.name!r} ({item.package}) cannot be used: it {refusal}")
            if leave_out(plugins, item, given, error):
                continue
            raise error
        found.append((item, plugin_options(item, given)))
    return found


def leave_out(
    plugins: PluginSet, item: Registered, given: Mapping[str, Mapping[str, object]], error: PluginError
) -> bool:
    """Whether the run does without a plugin that takes part and cannot: it is then told, and among ``plugins.broken``.

    Only a third party's can be left out, and one that was given options was asked for.
    """
    if item.package == OWN or given.get(item.key):
        return False
    broken = Broken(item.plugin, item.package, item.version, "start", str(error), (item.key,))
    if broken not in plugins.broken:
        plugins.broken.append(broken)
        log.warning("%s; it is left out, for no option of it was given", error)
    return True


def static_choice(plugins: PluginSet, family: str, requested: str) -> str:
    """What a choice will come to, where that needs no knowledge of the run: no plugin of the family can refuse."""
    items = ranked(plugins, family)
    depends = any(
        item.declaration.needs != Needs() or type(item.declaration).refusal is not Declaration.refusal for item in items
    )
    return requested if requested != "auto" or depends or not items else items[0].name


def probable_kernels(configs: Iterable[Config], plugins: PluginSet) -> list[Path]:
    """C++ sources of what these runs will probably choose: nothing that was asked for speaks against it."""
    found: dict[Path, None] = {}
    for config in configs:
        for item in plugins.all():
            declaration, device = item.declaration, item.declaration.needs.device
            option = FAMILIES[declaration.family].option
            if not declaration.kernels or config.engine.device not in (AUTO, device or config.engine.device):
                continue
            if option is None or option_value(config, plugins, option) in (AUTO, item.name):
                found.update(dict.fromkeys(declaration.kernels))
    return list(found)


def check_used(plugins: PluginSet, given: Mapping[str, Mapping[str, object]], chosen: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for an option of a plugin that ``auto`` passed over; ``chosen``: by family."""
    for key, values in given.items():
        family, _, name = key.partition(".")
        taken = chosen.get(family, name)
        item = plugins.by_family.get(family, {}).get(taken)
        if taken == name or FAMILIES[family].takes_all or (item is None and taken != "none"):
            continue
        known = item.declaration.options.model_fields if item and item.declaration.options is not None else {}
        unused = [option for option in values if option not in known]
        if unused:
            flag, how = ("--" + text.replace("_", "-") for text in (unused[0], FAMILIES[family].option or ""))
            instead = f"auto chose {item.key}" if item else f"this run uses no {FAMILIES[family].noun}"
            raise ConfigError(
                f"{flag} belongs to {key}, but {instead}: select it with {how} {name}, or leave {flag} out"
            )
