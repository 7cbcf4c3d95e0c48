"""Build the objects that declarations name: import the class, validate its options, construct it."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fwk.errors import FwkError, InvalidRequest, PluginError, PluginLoadError
from fwk.interfaces.declaration import Host
from fwk.plugins.answers import OWN_GUARDS, named
from fwk.plugins.discovery import OWN, PluginSet, Registered
from fwk.plugins.families import FAMILIES, ORDER, PARTS
from fwk.plugins.negotiation import Resolution
from fwk.plugins.selection import NOWHERE, find, is_enabled, leave_out, plugin_options, taking_part


@dataclass(frozen=True, slots=True)
class PluginFactory:
    """Builds plugins with the options that were given for them.

    given: ``Config.plugin_options``: raw values by plugin (``family.name``), then by option.
    resolution: the choices of the run; None in a process that makes no engine, which names plugins itself.
    """

    plugins: PluginSet
    given: Mapping[str, Mapping[str, object]]
    resolution: Resolution | None = None

    def item(self, family: str) -> Registered:
        """The plugin that the resolution chose from a family in use."""
        assert self.resolution is not None, "a factory without a resolution builds named plugins only"
        return self.resolution.item(family)

    def items(self, family: str) -> Sequence[Registered]:
        """What is installed of a family, best rank first."""
        return sorted(self.plugins.family(family), key=lambda item: -item.declaration.rank)

    def find(self, family: str, name: str) -> Registered:
        """What is installed under a name. Raises ``PluginError``."""
        return find(self.plugins, family, name)

    def load(self, item: Registered) -> Any:
        """Import the class that a declaration names. Raises ``PluginLoadError``."""
        return load_object(item)

    def joining(self, item: Registered, options: Mapping[str, object]) -> Callable[..., Any]:
        """What builds a plugin that takes part from now on, with these options. Raises as ``Plugins.joining`` says."""
        factory = replace(self, given={item.key: options})
        own, declaration, why = factory.options(item), item.declaration, None
        if self.resolution is not None:
            why = self.resolution.refusal(item, own)
        elif item.family not in (*ORDER, *PARTS):  # of those the engines know whether they can join them
            why = declaration.needs.refusal(NOWHERE)
        if why is not None:
            noun = FAMILIES[item.family].noun
            raise PluginError(f"{noun} {item.name!r} ({item.package}) cannot be used: it {why}")
        if not is_enabled(declaration, options):
            raise InvalidRequest(
                f"{item.key} is off unless its options say {' or '.join(declaration.enabled_by)}", "options"
            )
        return partial(factory.build, item)

    def options(self, item: Registered) -> Any:
        """The plugin's validated options. Raises ``ConfigError`` for a value that does not fit."""
        return plugin_options(item, self.given)

    def build(self, plugin: str | Registered, context: Callable[..., object], **fields: Any) -> Any:
        """Construct a plugin's object from ``context(**fields, options=...)``.

        plugin: a declaration, or a family, which stands for its chosen plugin. context: the family's context class.
        Raises ``PluginLoadError`` naming plugin, package and cause; the plugin's own ``FwkError`` as it is.
        """
        item = self.item(plugin) if isinstance(plugin, str) else plugin
        options = self.options(item)
        return build(item, context(**fields, options=options))

    def build_all(
        self, family: str, context: Callable[..., object], host: Host | None = NOWHERE, **fields: Any
    ) -> Iterator[tuple[Registered, Any]]:
        """Each plugin of a family that takes part, best rank first, with its object, built when it is asked for.

        host: as for ``taking_part``. Raises ``PluginError`` before the first is built when one of them lacks something.
        """
        for item, options in taking_part(self.plugins, family, self.given, host):
            built = self.build_or_leave_out(item, context(**fields, options=options))
            if built is not None:
                yield item, built

    def build_or_leave_out(self, item: Registered, context: Any, load: str | None = None) -> Any:
        """As ``build``, of one of those that take part; None where the run does without it (``leave_out``)."""
        try:
            return build(item, context, load)
        except PluginLoadError as error:
            if not leave_out(self.plugins, item, self.given, error):
                raise
            return None


def load_object(item: Registered, load: str | None = None) -> Any:
    """Import the declared class, with today's interface. Raises ``PluginLoadError`` naming plugin and cause.

    load: another ``"package.module:attribute"`` that the declaration names, taken as it is.
    """
    place = load or item.declaration.load
    module_name, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
        return found if item.adapter is None or load is not None else item.adapter.wrap(found)
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"plugin {item.source} failed to import {place}: {type(error).__name__}: {error}"
        ) from error


def build(item: Registered, context: Any, load: str | None = None) -> Any:
    """Import and construct a plugin's object. Raises ``PluginLoadError`` naming plugin, package and cause.

    load: as for ``load_object``.
    """
    cls = load_object(item, load)
    try:
        made = cls(context)
    except FwkError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginLoadError(f"plugin {item.source} failed to start: {type(error).__name__}: {error}") from error
    if item.family in OWN_GUARDS or (item.family == "executors" and item.package == OWN):
        return made  # what our executors run is core, and what core calls
    return named(item, made)


def code_owners(plugins: PluginSet) -> Iterator[tuple[str, str]]:
    """Where plugins' code lies, for ``fwk_process.crash``: modules that declarations name, and others' packages."""
    for item in plugins.all():
        module = item.declaration.load.partition(":")[0]
        yield f"{module.replace('.', '/')}.py", f"plugin {item.source}"
        if item.package != OWN:
            yield f"{module.partition('.')[0]}/", f"package {item.package} {item.version}"


def plugin_that_raised(plugins: PluginSet, error: BaseException) -> str | None:
    """The plugin in whose code an exception was raised, for the log; None when it was in nobody's.

    Goes by the modules on the exception's way, the innermost first: that a declaration's ``load`` names, or another
    of its package.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    for module in reversed(modules):
        package = module.partition(".")[0]
        loads = [(item, item.declaration.load.partition(":")[0]) for item in plugins.all()]
        owners = [item for item, load in loads if load.partition(".")[0] == package]
        exact = [item for item, load in loads if load == module]
        if owners:
            return f"plugin {exact[0].source}" if exact else f"package {owners[0].package} {owners[0].version}"
    return None
