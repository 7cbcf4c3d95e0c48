"""Options: typed, frozen, resolved once. Flags, YAML keys, help and ``docs/arguments.md`` all come from here.

Here belong the options core reads itself and what every options model is made with. Options of a plugin belong to the
plugin; parsing the command line belongs to ``fwk.cli``, giving every plugin its options to ``fwk.plugins``.
"""

from fwk.config.core import Config, PluginOptions
from fwk.config.engine import EngineOptions
from fwk.config.model import ModelOptions
from fwk.config.options import Options, Stability, aliases_of, is_secret, needs_of, option, stability_of, turned_by
from fwk.config.server import ServerOptions

__all__ = [
    "Config",
    "EngineOptions",
    "ModelOptions",
    "Options",
    "PluginOptions",
    "ServerOptions",
    "Stability",
    "aliases_of",
    "is_secret",
    "needs_of",
    "option",
    "stability_of",
    "turned_by",
]
