"""Former names of what plugins may import. Each still works, with a ``DeprecationWarning`` that says the new one.

The only place of them: what moves gets a row here, and its file keeps nothing of the old name
(``docs/plugins/stability.md``). ``fwk`` imports this; of ``fwk`` nothing is imported before a name is asked for.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODULES: Mapping[str, str] = {
    "fwk.config.files": "fwk_files.regular",
    "fwk.interfaces.cache": "fwk.interfaces.prefix_cache",
    "fwk.interfaces.deprecated": "fwk_deprecated",
    "fwk.interfaces.http": "fwk_http.replies",
    "fwk.interfaces.life": "fwk.interfaces.lifecycle",
    "fwk.interfaces.model_names": "fwk_http.bodies",
    "fwk.interfaces.ranked": "fwk.interfaces.ranked_list",
    "fwk.interfaces.tokenizer_bounds": "fwk_tokenizer.bounds",
    "fwk.layers": "fwk_layers",
    "fwk.layers.activation": "fwk_layers.activation",
    "fwk.layers.attention": "fwk_layers.attention",
    "fwk.layers.cross_attention": "fwk_layers.cross_attention",
    "fwk.layers.embedding": "fwk_layers.embedding",
    "fwk.layers.encoder": "fwk_layers.encoder",
    "fwk.layers.heads": "fwk_layers.heads",
    "fwk.layers.hidden_tap": "fwk_layers.hidden_tap",
    "fwk.layers.insert": "fwk_layers.insert",
    "fwk.layers.linear": "fwk_layers.linear",
    "fwk.layers.logprobs": "fwk.interfaces.logprobs",
    "fwk.layers.mlp": "fwk_layers.mlp",
    "fwk.layers.moe": "fwk_layers.moe",
    "fwk.layers.norm": "fwk_layers.norm",
    "fwk.layers.placed_experts": "fwk_layers.placed_experts",
    "fwk.layers.rope": "fwk_layers.rope",
    "fwk.layers.select_tokens": "fwk_layers.select_tokens",
    "fwk.layers.sharding": "fwk_layers.sharding",
    "fwk.layers.state": "fwk.interfaces.state",
    "fwk.layers.wanted": "fwk_layers.select_tokens",
    "fwk.native": "fwk_native",
    "fwk.native.huge_pages": "fwk_native.huge_pages",
    "fwk.native.memory": "fwk_native.memory",
    "fwk.native.thread_pool": "fwk_native.thread_pool",
    "fwk.process": "fwk_process",
    "fwk.process.folders": "fwk_process.folders",
    "fwk.process.parent": "fwk_process.parent",
    "fwk.types.config_numbers": "fwk_files.config_numbers",
    "fwk.types.beam_search": "fwk_features.beam_search.search",
    "fwk.team": "fwk_native.thread_pool",
}
"""Modules, by their former names."""

NAMES: Mapping[str, Mapping[str, str]] = {
    "fwk.errors": {"story": "fwk.errors.one_line_traceback"},
    "fwk.interfaces.lifecycle": {"Life": "fwk.interfaces.lifecycle.PluginLifecycle"},
    "fwk.interfaces.parallel": {
        "PR_SET_PDEATHSIG": "fwk_process.parent.PR_SET_PDEATHSIG",
        "continue_with_parent_gone": "fwk_process.parent.continue_with_parent_gone",
    },
    "fwk.layers.select_tokens": {"WantedTokens": "fwk_layers.select_tokens.SelectTokens"},
    "fwk.layers.wanted": {"WantedTokens": "fwk_layers.select_tokens.SelectTokens"},
    "fwk.native": {
        "COMMON_FLAGS": "fwk_native.build.COMMON_FLAGS",
        "COMPILERS": "fwk_native.compiler.COMPILERS",
        "TIMEOUT": "fwk_native.compiler.TIMEOUT",
    },
    "fwk.native.huge_pages": {
        "forgotten": "fwk_native.huge_pages.discard_writes",
        "populate_soon": "fwk_native.huge_pages.prefault_async",
    },
    "fwk.native.memory": {"MemoryAhead": "fwk_native.memory.MemoryPrefaulter"},
    "fwk.native.thread_pool": {"Team": "fwk_native.thread_pool.ThreadPool"},
    "fwk.types": {
        "AdapterInfo": "fwk.interfaces.lora.AdapterInfo",
        "Media": "fwk.interfaces.multimodal.Media",
        "PoolingConfig": "fwk.interfaces.pooling.PoolingConfig",
    },
    "fwk.types.request": {"AdapterInfo": "fwk.interfaces.lora.AdapterInfo"},
}
"""Names in modules, some of which have moved since: where each is now."""

MEMBERS: Mapping[str, Mapping[str, str]] = {
    "fwk.interfaces.attention": {"AttentionContext.team": "threads"},
    "fwk.interfaces.balance": {"BalanceContext.life": "lifecycle"},
    "fwk.interfaces.dialect": {"DialectContext.life": "lifecycle"},
    "fwk.interfaces.observer": {"ObserverContext.life": "lifecycle"},
    "fwk.interfaces.operators": {"OperatorContext.team": "threads"},
    "fwk.interfaces.quant": {"QuantContext.team": "threads"},
    "fwk.interfaces.sampling": {"SamplingContext.team": "threads"},
    "fwk.types.batch": {"ForwardBatch.logits_at": "logits_indices"},
}
"""What plugins read of objects they are given: how each is called now. Methods that plugins implement are renamed by
``follow_renamed_methods``."""


def follow_renamed_methods(cls: type, names: Mapping[str, str]) -> None:
    """Let a subclass that defines methods by their former names (``names``: old to new) be called by the new ones."""
    for old, new in names.items():
        if old in vars(cls) and new not in vars(cls):
            _warn(f"{cls.__module__}.{cls.__qualname__}.{old}", new, 3)
            setattr(cls, new, vars(cls)[old])


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel=stacklevel + 1)


class _Former(ModuleType):
    """A module under a former name. What the new one has is not hidden by a submodule of its name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType):  # importlib sets a package's submodules
            new = getattr(sys.modules.get(MODULES[self.__name__]), name, value)
            value = value if isinstance(new, ModuleType) else new
        super().__setattr__(name, value)


class _FormerModule:
    """A loader of modules under a former name: what they have is another's."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Former(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        new = MODULES[module.__name__]
        _warn(module.__name__, new, 2)  # at the import statement: the importlib between does not count
        found = importlib.import_module(new)
        module.__getattr__ = partial(_find_moved, module.__name__, found)  # type: ignore[method-assign]
        module.__dict__["__all__"] = [name for name in dir(found) if not name.startswith("_")]


class _FormerNames:
    """Finds modules by former names, and gives modules that are still there what they had."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, _FormerModule())  # pyright: ignore[reportArgumentType]
        if fullname not in NAMES and fullname not in MEMBERS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_exec_with_names, spec.loader.exec_module)
        return spec


def _exec_with_names(exec_module: Any, module: ModuleType) -> None:
    exec_module(module)
    if module.__name__ in NAMES:
        module.__getattr__ = partial(_find, module.__name__)  # type: ignore[method-assign]
    for member, new in MEMBERS.get(module.__name__, {}).items():
        owner, _, old = member.partition(".")
        setattr(getattr(module, owner), old, property(partial(_read, member, new)))


def _find(module: str, name: str) -> Any:
    new = NAMES.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", new, 2)
    place, _, attribute = new.rpartition(".")
    return getattr(importlib.import_module(place), attribute)


def _find_moved(module: str, found: ModuleType, name: str) -> Any:
    return getattr(found, name) if hasattr(found, name) else _find(module, name)


def _read(member: str, new: str, owner: Any) -> Any:
    _warn(member, new, 2)
    return getattr(owner, new)


if not any(isinstance(finder, _FormerNames) for finder in sys.meta_path):
    sys.meta_path.insert(0, _FormerNames())  # pyright: ignore[reportArgumentType]
