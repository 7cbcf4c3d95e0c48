"""Finding, loading and choosing plugins."""

from fwk.plugins.discovery import Broken, PluginSet, Registered, discover
from fwk.plugins.factory import PluginFactory
from fwk.plugins.families import FAMILIES, Family
from fwk.plugins.negotiation import Judgement, Resolution, judge, negotiate
from fwk.plugins.options import OptionOwner, build_config, option_owners
from fwk.plugins.selection import (
    Candidate,
    Selection,
    build,
    choose,
    find,
    load_object,
    plugin_that_raised,
    taking_part,
)
from fwk.plugins.versions import VERSIONS, Adapter, ApiVersion

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
