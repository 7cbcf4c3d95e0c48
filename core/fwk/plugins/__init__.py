"""Finding, loading and choosing plugins."""

from fwk.plugins.discovery import Broken, PluginSet, Registered, discover
from fwk.plugins.families import FAMILIES, Family
from fwk.plugins.negotiation import Judgement, Settlement, judge, negotiate
from fwk.plugins.options import OptionOwner, build_config, option_owners
from fwk.plugins.selection import Candidate, Selection, build, choose, culprit, find, load_object, taking_part
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
    "PluginSet",
    "Registered",
    "Selection",
    "Settlement",
    "build",
    "build_config",
    "choose",
    "culprit",
    "discover",
    "find",
    "judge",
    "load_object",
    "negotiate",
    "option_owners",
    "taking_part",
]
