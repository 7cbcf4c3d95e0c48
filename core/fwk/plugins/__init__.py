"""Discovery, loading and choice of plugins, and their options.

Here belong the table of families (``families``), entry points (``discovery``), what may run together
(``selection``, ``negotiation``), versions of the interfaces (``versions``) and building what was chosen (``factory``).
What a family's plugins implement belongs to ``fwk.interfaces``, the model and machine they are chosen for to
``fwk.setup``; nothing here knows a plugin by name.
"""

from fwk.plugins.discovery import Broken, PluginSet, Registered, discover
from fwk.plugins.factory import PluginFactory, build, load_object, plugin_that_raised
from fwk.plugins.families import FAMILIES, VERSIONS, Family
from fwk.plugins.negotiation import Judgement, Resolution, judge, negotiate
from fwk.plugins.options import OptionOwner, build_config, option_owners
from fwk.plugins.selection import Candidate, Selection, choose, find, taking_part
from fwk.plugins.versions import Adapter, ApiVersion

__all__ = [
    "FAMILIES",
    "VERSIONS",
    "Adapter",
    "ApiVersion",
    "Broken",
    "Candidate",
    "Family",
    "Judgement",
    "OptionOwner",
    "PluginFactory",
    "PluginSet",
    "Registered",
    "Resolution",
    "Selection",
    "build",
    "build_config",
    "choose",
    "discover",
    "find",
    "judge",
    "load_object",
    "negotiate",
    "option_owners",
    "plugin_that_raised",
    "taking_part",
]
