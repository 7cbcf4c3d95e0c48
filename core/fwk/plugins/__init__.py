"""Finding, loading and choosing plugins."""

from fwk.plugins.discovery import Broken, PluginSet, Registered, discover
from fwk.plugins.families import FAMILIES, Family
from fwk.plugins.selection import Candidate, Selection, build, choose, find, load_object

__all__ = [
    "FAMILIES",
    "Broken",
    "Candidate",
    "Family",
    "PluginSet",
    "Registered",
    "Selection",
    "build",
    "choose",
    "discover",
    "find",
    "load_object",
]
