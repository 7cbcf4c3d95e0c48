"""From flat options (flags, YAML keys, ``LLM`` arguments) to a ``Config``: every option has one owner."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from fwk.config import (
    Config,
    EngineOptions,
    ModelOptions,
    Options,
    PluginOptions,
    ServerOptions,
    aliases_of,
    is_secret,
    needs_of,
    turned_by,
)
from fwk.errors import ConfigError, PluginError, what_is_wrong
from fwk.interfaces.feature import FeatureSpec
from fwk.interfaces.prefix_cache import CacheTierSpec
from fwk.plugins.discovery import PluginSet, Registered
from fwk.plugins.families import FAMILIES, Family, closest
from fwk.plugins.lock import check_lock
from fwk.plugins.selection import (
    AUTO,
    enabled_by_name,
    find,
    is_enabled,
    is_named,
    is_used,
    option_value,
    own_name,
    static_choice,
)
from fwk_peers.arguments import FALSE, TRUE, foreign, meant, note
from fwk_peers.catalogue import read_catalogue

_log = logging.getLogger(__name__)

_CORE: dict[str, type[Options]] = {
    "model": ModelOptions,
    "engine": EngineOptions,
    "server": ServerOptions,
    "plugins": PluginOptions,
}


@dataclass(frozen=True, slots=True)
class OptionOwner:
    """A set of options and whose it is: a part of core, or a plugin (``item``)."""

    title: str
    model: type[Options]
    item: Registered | None = None

    @property
    def key(self) -> str:
        return self.item.key if self.item is not None else self.title


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a name stands for: an option of some owners, and the constant it is set to if it takes no value."""

    option: str
    owners: tuple[OptionOwner, ...]
    constant: Any = None
    is_constant: bool = False

    @property
    def kind(self) -> Any:
        """The option's type."""
        return self.owners[0].model.model_fields[self.option].annotation


def flag(option: str) -> str:
    """``page_size`` as the user writes it."""
    return "--" + option.replace("_", "-")


def normal(name: str) -> str:
    """One spelling for ``--page-size``, ``page_size`` and ``page-size``."""
    return name.strip().lstrip("-").replace("-", "_")


def option_owners(plugins: PluginSet) -> list[OptionOwner]:
    """Core's sets first, then each plugin's that has options, by family and name."""
    owners = [OptionOwner(title, model) for title, model in _CORE.items()]
    for item in plugins.all():
        if item.declaration.options is not None:
            title = f"{item.key} ({FAMILIES[item.family].noun}, from {item.package})"
            owners.append(OptionOwner(title, item.declaration.options, item))
    return owners


def switches(plugins: PluginSet) -> dict[str, dict[str, str]]:
    """Flags without a value that select a plugin: by the option they set, the flag and the plugin's name."""
    found: dict[str, dict[str, str]] = {}
    for item in plugins.all():
        option = FAMILIES[item.family].option
        for name in item.declaration.switches if option is not None else ():
            found.setdefault(option or "", {})[name] = item.name
    return found


def called(plugins: PluginSet) -> dict[str, str]:
    """Every name an option can be given by, dashes as underscores, and how it is written with our own name."""
    return {
        name: f"{flag(meaning.option)} {meaning.constant}" if meaning.is_constant else flag(meaning.option)
        for name, meaning in _meanings(plugins).items()
    }


def build_config(plugins: PluginSet, given: Mapping[str, Any], tell: Callable[[str], None] = _log.info) -> Config:
    """Validate options given by any name they are known by. Raises ``ConfigError`` for the first that is wrong.

    tell: hears of other servers' arguments that are accepted because they ask for what is so anyway.
    """
    meanings = _meanings(plugins)
    values: dict[str, dict[str, Any]] = {}
    named: dict[str, str] = {}
    for name, value in given.items():
        meaning = meanings.get(normal(name))
        if meaning is None:
            accepted = note(name, value)
            if accepted is None:
                raise ConfigError(_unknown(name, meanings, plugins, given))
            tell(accepted)
            continue
        written = _written(plugins, flag(normal(name)), value, meaning)
        if written is None:
            continue
        if named.get(meaning.option, flag(normal(name))) != flag(normal(name)):
            raise ConfigError(f"{flag(normal(name))} and {named[meaning.option]} both set {flag(meaning.option)}")
        named[meaning.option] = flag(normal(name))
        for owner in meaning.owners:
            values.setdefault(owner.key, {})[meaning.option] = written
    core = {title: _validated(model, values.pop(title, {})) for title, model in _CORE.items()}
    config = Config(**core, plugin_options=values)
    asked = [item.key for name in config.plugins.enable_plugin for item in enabled_by_name(plugins, name)]
    if config.plugins.plugins_lock is not None:
        asked += check_lock(config.plugins.plugins_lock, plugins)
    for key in asked:
        values.setdefault(key, {})
    off = [item.key for item in plugins.all() if not is_named(item, values)]
    if off:
        tell(f"installed and not used: {', '.join(off)}; --enable-plugin turns them on")
    _check_names(config, plugins)
    _check_selected(config, plugins)
    return config


def _written(plugins: PluginSet, name: str, value: Any, meaning: _Meaning) -> Any:
    """A value as the option takes it; None where nothing is said: by a YAML file's null, or a switch that is off."""
    if meaning.is_constant:
        return _constant(plugins, name, value, meaning)
    if get_origin(meaning.kind) is tuple and isinstance(value, str | int | float | list | tuple):
        return [_named(plugins, meaning, x) if isinstance(x, str) else x for x in _listed(value)]
    if isinstance(value, str):
        return _named(plugins, meaning, value)
    is_json = isinstance(value, Mapping) and _nested(meaning.kind) is None
    return json.dumps(value) if is_json else cast("Any", value)  # an object of JSON, as YAML writes it


def _constant(plugins: PluginSet, name: str, value: Any, meaning: _Meaning) -> Any:
    """What a switch sets its option to; None if it is off, unless leaving it out comes to the same as giving it."""
    word = str(value).lower()
    if value is None or word in TRUE:
        return meaning.constant
    if word not in FALSE:
        raise ConfigError(f"{name} takes no value")
    default = meaning.owners[0].model.model_fields[meaning.option].default
    family = next((key for key, family in FAMILIES.items() if family.option == meaning.option), None)
    if meaning.constant in (default, static_choice(plugins, family, default) if family is not None else default):
        option = flag(meaning.option)
        raise ConfigError(
            f"{name} {value}: without it {option} is {meaning.constant}, too; give {option} another value"
        )
    return None


def _listed(given: Any) -> Sequence[Any]:
    """Several values, which may be one, or a JSON list of them."""
    values = cast("Sequence[Any]", given) if isinstance(given, list | tuple) else [given]
    if len(values) == 1 and str(values[0]).startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(values[0])
    return values


def _literals(kind: Any) -> tuple[Any, ...]:
    """The words and numbers that an option's type lists."""
    args = get_args(kind)
    return args if get_origin(kind) is Literal else tuple(word for part in args for word in _literals(part))


def _nested(kind: Any) -> Any:
    """The model, or ``dict``, whose fields an option of this type has; None: it has none."""
    if kind is dict or get_origin(kind) is dict:
        return cast("Any", dict)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((found for part in get_args(kind) if (found := _nested(part)) is not None), None)


def _named(plugins: PluginSet, meaning: _Meaning, value: str) -> Any:
    """A value as it is called here: a plugin's name or a word in its own case, or another server's value as ours."""
    option = meaning.option
    family = next((f for key, f in FAMILIES.items() if option in naming(plugins, key)), None)
    if family is None:
        words = {str(word).lower(): word for word in _literals(meaning.kind)}
        if value[:1] in ("{", "[") and _nested(meaning.kind) is not None:
            try:
                return json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{flag(option)} is not JSON: {error}") from None
        return words[value.lower()] if value.lower() in words else meant(option, value)
    names = {item.name for item in plugins.family(family.spec.family)}
    own = value if value in names else value.lower() if value.lower() in names else None
    return own or own_name(plugins, family.spec.family, meant(family.option or option, value, option))


def naming(plugins: PluginSet, family: str) -> list[str]:
    """Options that name plugins of a family: its own, and those of features that use some (``FeatureSpec.uses``)."""
    specs = [item.declaration for item in plugins.family("features")]
    used = [option for spec in specs if isinstance(spec, FeatureSpec) for of, option in spec.uses if of == family]
    return list(dict.fromkeys(filter(None, (FAMILIES[family].option, *used))))


def _check_names(config: Config, plugins: PluginSet) -> None:
    """Raise for a name that nothing has: ``PluginError`` for a plugin's, ``ConfigError`` for a word they offer."""
    for family in FAMILIES.values():
        for option, name in _chosen_by(config, plugins, family):
            if name != AUTO and not (name == "none" and family.has_none):
                try:
                    find(plugins, family.spec.family, name)
                except PluginError as error:
                    raise type(error)(f"{flag(option)}: {error}") from None
    offered: dict[str, set[str]] = {"kv_cache_dtype": {AUTO}, "task": {AUTO, "generate"}}
    for item in (*plugins.family("attention"), *plugins.family("models")):
        offered["kv_cache_dtype"] |= set(getattr(item.declaration, "kv_dtypes", ()))
        for architecture in getattr(item.declaration, "architectures", ()):
            offered["task"] |= set(cast("Any", item.declaration).tasks_of(architecture))
    for option, words in offered.items():
        value = getattr(config.engine, option, None) or getattr(config.model, option)
        if value not in words:
            hint = closest(value, words)
            raise ConfigError(
                f"{flag(option)}: no installed plugin offers {value!r}{hint}; {', '.join(sorted(words))} are"
            )


def _chosen_by(config: Config, plugins: PluginSet, family: Family) -> Iterator[tuple[str, str]]:
    """Options that choose from a family, and each name that they are given."""
    for option in naming(plugins, family.spec.family):
        value = option_value(config, plugins, option)
        yield from ((option, name) for name in ((value,) if isinstance(value, str) else value or ()))
    if family.pattern_option:
        yield from (
            (family.pattern_option, text.rpartition("=")[2]) for text in getattr(config.engine, family.pattern_option)
        )


def _check_selected(config: Config, plugins: PluginSet) -> None:
    """Options of a plugin that is not selected are an error; the others are validated now."""
    for owner in option_owners(plugins):
        if owner.item is None or not config.plugin_options.get(owner.key):
            continue
        family = FAMILIES[owner.item.family]
        given = config.plugin_options[owner.key]
        first = flag(next(iter(given)))
        _check_used(config, plugins, owner.item, first)
        if not family.takes_all:
            selected = _selected(config, plugins, family)
            others = [o for o in option_owners(plugins) if o.item and set(given) <= set(o.model.model_fields)]
            names = {o.item.name for o in others if o.item and o.item.family == owner.item.family}
            patterns = getattr(config.engine, family.pattern_option) if family.pattern_option else ()
            names_by_pattern = {text.rpartition("=")[2] for text in patterns}
            if not selected & {owner.item.name, "auto"} and not names & (selected | names_by_pattern):
                able = " or ".join(sorted(names))
                how = f"select it with {flag(family.option)} {able}" if family.option else "nothing selects it"
                raise ConfigError(f"{first} belongs to {owner.key}, which is not selected: {how}, or leave {first} out")
        elif not is_enabled(owner.item.declaration, given):
            on, off = owner.item.declaration.enabled_by, owner.item.declaration.disabled_by
            others = [name for name in given if name not in (*on, *off)]
            if others:
                _validated(owner.model, given)  # an option may say better what it needs
                ways = " or ".join([*map(flag, on), *(f"{flag(name)} false" for name in off if name in given)])
                raise ConfigError(f"{flag(others[0])} belongs to {owner.key}, which is off: turn it on with {ways}")
        options = _validated(owner.model, given)
        conflict = owner.item.declaration.conflict(options, config.engine)
        if conflict is not None:
            raise ConfigError(conflict)


def _check_used(config: Config, plugins: PluginSet, item: Registered, first: str) -> None:
    """Raise ``ConfigError`` for a plugin's option, ``first``, where the run uses nothing of its family."""
    family = FAMILIES[item.family]
    if family.switch is not None and not is_used(config, plugins, item.family):
        raise ConfigError(f"{first} belongs to {item.key}, which is not used: add {flag(family.switch)}")
    owners = [o.item for o in option_owners(plugins) if family.option in o.model.model_fields]
    if family.option is not None and not owners:
        raise ConfigError(f"{first} belongs to {item.key}, and no installed plugin uses a {family.noun}")
    chooser = owners[0] if owners else None
    if chooser is not None and not is_enabled(chooser.declaration, config.plugin_options.get(chooser.key, {})):
        ways = " or ".join(map(flag, chooser.declaration.enabled_by))
        raise ConfigError(f"{first} belongs to {item.key}, which is not used: add {ways}, or leave {first} out")


def _selected(config: Config, plugins: PluginSet, family: Family) -> set[str]:
    """Names chosen from a family, or ``auto``."""
    if family.option is None:
        return set()
    values = [option_value(config, plugins, option) for option in naming(plugins, family.spec.family)]
    names = {name for value in values for name in ((value,) if isinstance(value, str) else value or ())}
    names = {static_choice(plugins, family.spec.family, name) for name in names}
    if family.spec is CacheTierSpec:
        cache = plugins.by_family.get("cache", {}).get(static_choice(plugins, "cache", config.engine.prefix_cache))
        names |= set(getattr(cache.declaration, "tiers", None) or ()) if cache is not None else set()
    return names


def _validated(model: type[Options], values: Mapping[str, Any]) -> Any:
    """A set of options; one that another of them must switch on is an error without it."""
    try:
        options = model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        field = model.model_fields.get(str(first["loc"][0])) if first["loc"] else None
        name, hint = _where(model, first["loc"]) if first["loc"] else ("", "")
        given = "what was given" if field is not None and is_secret(field) else repr(first["input"])
        said = what_is_wrong(first, given) if first["type"] != "extra_forbidden" else f"there is no such field{hint}"
        raise ConfigError(said if said.startswith(name or "--") else f"{name}: {said}" if name else said) from None
    except Exception as error:  # a plugin's own check that is broken
        flags = ", ".join(map(flag, values))
        raise PluginError(
            f"{flags} could not be checked by {model.__module__}: {type(error).__name__}: {error}"
        ) from error
    for name in values:
        switch = needs_of(model.model_fields[name])
        if switch is not None and not getattr(options, switch):
            raise ConfigError(f"{flag(name)} does nothing without {flag(switch)}: add it, or leave {flag(name)} out")
    return options


def _where(model: type[BaseModel], place: Sequence[Any]) -> tuple[str, str]:
    """The flag that an error is about, with the path into its value, and a hint at a field that may have been meant."""
    name, hint = flag(str(place[0])), ""
    kind = _nested(model.model_fields[place[0]].annotation) if place[0] in model.model_fields else None
    for part in place[1:] if kind is not None else ():
        fields = getattr(kind, "model_fields", {})
        name, hint = f"{name}.{part}", closest(str(part), fields)
        kind = _nested(fields[part].annotation) if part in fields else kind
    return name, hint


def _meanings(plugins: PluginSet) -> dict[str, _Meaning]:
    """Every name an option can be given by."""
    found: dict[str, _Meaning] = {}
    for owner in option_owners(plugins):
        for name, field in owner.model.model_fields.items():
            before = found.get(name)
            if before is None:
                found[name] = _Meaning(name, (owner,))
            elif all(
                o.item is not None and _told(o.model, before.option) == _told(owner.model, name) for o in before.owners
            ):
                found[name] = _Meaning(name, (*before.owners, owner))  # two plugins share an option
            else:
                raise PluginError(
                    f"option {flag(name)} is declared by {_whose(before.owners[0])} and by {_whose(owner)}"
                )
            for alias in aliases_of(field):
                other = found.setdefault(normal(alias), found[name])
                if other.option != name:
                    raise PluginError(
                        f"{flag(normal(alias))} is another name of {flag(name)} of {owner.key}, and already stands for "
                        f"{flag(other.option)} of {other.owners[0].key}: uninstall one of their packages"
                    )
            for turn, constant in turned_by(field).items():
                found.setdefault(normal(turn), _Meaning(name, found[name].owners, constant, True))
    for name, turns in switches(plugins).items():
        for turn, plugin in turns.items() if name in found else ():  # else what would have the option is not installed
            found.setdefault(normal(turn), _Meaning(name, found[name].owners, plugin, True))
    return found


@cache
def _told(model: type[Options], name: str) -> str:
    """All that is declared of an option."""
    return repr(model.model_fields[name])


def _whose(owner: OptionOwner) -> str:
    return owner.key if owner.item is None else f"{owner.key} ({owner.item.package} {owner.item.version})"


def _unknown(name: str, meanings: Mapping[str, _Meaning], plugins: PluginSet, given: Mapping[str, Any]) -> str:
    path = next((value for key, value in given.items() if normal(key) == "plugin_catalogue"), None)
    for package in read_catalogue(str(path)) if path is not None else ():
        if package.owns(flag(normal(name))):
            return f"{flag(normal(name))} belongs to {package.package}, which is not installed: {package.install}"
    known = foreign(name)
    if known is not None:
        return known.answer()
    close = difflib.get_close_matches(normal(name), list(meanings), 1)
    hint = f" (did you mean {flag(close[0])}?)" if close else ""
    broken = f"; {len(plugins.broken)} installed plugins are broken, see 'fwk plugins list'" if plugins.broken else ""
    shown = name if name[:1] == "-" != name[1:2] else flag(normal(name))  # as it is typed
    return f"unknown option {shown}{hint}: neither core nor an installed plugin has it{broken}"
