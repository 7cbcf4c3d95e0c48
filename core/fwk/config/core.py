"""Everything that core itself reads. A plugin's options live with the plugin; core never learns their fields."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from fwk.config.engine import EngineOptions
from fwk.config.model import ModelOptions
from fwk.config.options import Options, option
from fwk.config.server import ServerOptions


class PluginOptions(Options):
    """How plugins are chosen."""

    strict: bool = option(
        False, "Make it an error when auto departs from the checkpoint's dtype or from the best-ranked plugin."
    )
    plugin_catalogue: str | None = option(
        None,
        "TOML file of plugins that need not be installed (tables [[plugin]] with package and flags): a flag of one is "
        "answered with how to install it.",
        stability="beta",
    )
    allow_override: tuple[str, ...] = option((), "Names a plugin may take over from another (family.name).")
    enable_plugin: tuple[str, ...] = option(
        (),
        "Plugins of other packages to use where all that are on take part (dialects, observers, logits processors, "
        "features, sources of models and adapters): by name, family.name or package. An option of such a plugin, and "
        "--plugins-lock, turn it on, too.",
        stability="beta",
    )
    plugins_lock: str | None = option(
        None, "File of 'fwk plugins freeze': nothing starts unless exactly those plugins are installed."
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that was asked for, validated; nothing assigns to it afterwards.

    ``plugin_options`` holds the options of each plugin some were given for, by the plugin's name.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    plugins: PluginOptions = field(default_factory=PluginOptions)
    plugin_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    seed: int = field(default_factory=lambda: secrets.randbits(62))
