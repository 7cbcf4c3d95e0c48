"""What a model's weights depend on, but for the code of the layers that hold them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fwk.config import Config
from fwk.interfaces.parallel import ParallelGroup
from fwk.plugins import PluginSet
from fwk.setup.checkpoint import OpenedModel
from fwk.setup.resolve import ModelSetup
from fwk_files.fingerprint import known_files
from fwk_native import cpu_flags, isa

_OPTIONS = ("quantization", "quantization_exclude", "quantization_layers", "enable_fp32_lm_head")
_FAMILIES = ("quant", "loaders", "models", "moe")


def model_identity(
    config: Config, setup: ModelSetup, opened: OpenedModel, group: ParallelGroup, role: str, features: Sequence[str]
) -> str:
    """A hash of all that decides them but the versions of kernels (``ModelBuild.identity``).

    features: what those that change the weights say (``WorkerPart.model_context``). A file's time of change (ctime) is
    in it, which nobody can set: bytes between samples that were written in place.
    """
    path = opened.path.resolve()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    remote = opened.checkpoint.weights_identity()
    known: dict[str, Any] = {
        "files": known_files(path),
        "changed": [file.stat().st_ctime_ns for file in files],
        "weights": remote,
        "loader": [opened.loader, _code(setup.factory.plugins, "loaders", opened.loader)],
        "model": _code(setup.factory.plugins, "models", setup.factory.item("models").name),
        "config": dict(opened.config.raw),
        "task": [opened.task, role],
        "dtype": setup.facts.dtype,
        "machine": [isa(), sorted(cpu_flags()), sys.byteorder],
        "engine": {name: getattr(config.engine, name) for name in _OPTIONS},
        "options": {
            name: dict(values)
            for name, values in sorted(config.plugin_options.items())
            if name.partition(".")[0] in _FAMILIES and not (remote and name.startswith("loaders."))
        },
        "features": list(features),
        "rank": [group.rank, group.size, group.stage.index, group.stage.count],
    }
    return hashlib.blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=32).hexdigest()


def _code(plugins: PluginSet, family: str, name: str) -> str:
    """Of a plugin that decides what a tensor's numbers are: its version, and its files while that is the same."""
    item = plugins.by_family[family][name]
    try:
        module = importlib.util.find_spec(item.declaration.load.partition(":")[0])  # which may not be imported yet
    except ValueError:  # made by hand, of no file
        module = None
    source = module.origin if module is not None and module.has_location else None
    named = f"{item.package} {item.version} {item.declaration.load}"
    return f"{named} {_sources(Path(source).parent)}" if source else named


def _sources(folder: Path) -> str:
    """A hash of a folder's sources."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.iterdir()):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
