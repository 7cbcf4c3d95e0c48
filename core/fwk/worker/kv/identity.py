"""What tells the K/V of one model, precision and layout from that of another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fwk.config import Config
from fwk.interfaces.attention import AttentionLayer, KVKind
from fwk.interfaces.declaration import installed_version
from fwk.interfaces.parallel import ParallelGroup
from fwk.plugins import FAMILIES, PluginSet
from fwk.setup.resolve import ModelSetup

_HARMLESS = frozenset(
    {
        "cache", "cache_tiers", "schedulers", "executors", "samplers", "logits_processors", "grammar", "tool_parsers",
        "reasoning_parsers", "dialects", "observers", "kv_transfer", "model_sources", "engine_pools", "load_balancers",
    }
)  # fmt: skip
"""Families that cannot change what a token's K/V is. Whatever is not named here is taken for one that can."""

_HARMLESS_OPTIONS = frozenset(
    {
        "executor", "disable_overlap_schedule", "sampling_backend", "schedule_policy", "prefix_cache",
        "speculative_algorithm", "grammar_backend", "max_total_tokens", "mem_fraction_static",
        "device_reserve_memory_bytes",
        "max_running_requests", "max_prefill_tokens", "chunked_prefill_size", "random_seed", "check_blocks",
    }
)  # fmt: skip
"""The same of core's options."""


def kv_identity(
    config: Config,
    plugins: PluginSet,
    setup: ModelSetup,
    chosen: dict[str, str],
    layers: list[AttentionLayer],
    tp: ParallelGroup,
    files: str,
) -> bytes:
    """32 bytes that are the same exactly when nothing that K/V depend on is known to differ.

    files: ``ModelHash`` of the model's; empty where K/V never leave the process.
    """
    facts = setup.facts
    remote = setup.opened.checkpoint.weights_identity()
    known: dict[str, Any] = {
        "files": files,
        "weights": remote,
        "loader": setup.opened.loader,
        "config": dict(setup.opened.config.raw),
        "facts": [facts.host.device, facts.dtype, facts.kv_dtype, facts.block_size, sorted(facts.features)],
        "engine": config.engine.model_dump(mode="json", exclude=set(_HARMLESS_OPTIONS)),
        "plugins": {
            family: [name, _version(plugins, family, name)]
            for family, name in sorted(chosen.items())
            if family not in _HARMLESS
        },
        "options": {
            key: dict(values)
            for key, values in _options(config, plugins, _HARMLESS | {"loaders"} if remote else _HARMLESS)
        },
        "layers": [
            [str(layer.kv_spec), list(layer.kv_cache.shape[1:]), str(layer.kv_cache.dtype)]
            for layer in layers
            if layer.kv_cache is not None
        ],
        "rank": [tp.rank, tp.size, tp.stage.index, tp.stage.count],
    }
    return hashlib.blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=32).digest()


_OWN = frozenset({"cpu_threads", "disable_progress_bars", "tensor_parallel_size"})
"""Options in which servers that exchange K/V may differ, for these are of the one's machine or work alone."""


def kv_common(
    config: Config,
    plugins: PluginSet,
    setup: ModelSetup,
    chosen: dict[str, str],
    layers: list[AttentionLayer],
    tp: ParallelGroup,
    files: str,
) -> dict[str, str]:
    """What two servers must have in common for one's K/V to be the other's, by the words that a message calls it by.

    Unlike ``kv_identity`` it is the same on another machine, which has copies of the model's files, and for other ranks
    and numbers of ranks, where blocks can be cut by heads.
    """
    facts, opened = setup.facts, setup.opened
    naming = {family.option for family in FAMILIES.values() if family.option}
    engine = config.engine.model_dump(mode="json", exclude=set(_HARMLESS_OPTIONS | _OWN | naming))
    given = {f"--{key.replace('_', '-')}": value for key, value in engine.items()}
    given |= {f"--{key.replace('_', '-')}": getattr(config.model, key) for key in ("json_model_override_args",)}
    harmless = _HARMLESS | {"loaders", "speculative"}  # drafts decide how soon a token comes, not which
    caches = [layer for layer in layers if layer.kv_cache is not None]
    is_cut = all(layer.kind is KVKind.LATENT or layer.head_dim is not None for layer in caches)
    found: dict[str, object] = {
        "the version of fwk": installed_version("fwk"),
        "the model (what its files hold)": files,
        "the weights' identity": opened.checkpoint.weights_identity(),
        "the device": facts.host.device,
        "the model's dtype": facts.dtype,
        **given,
        **{
            f"the plugin of {family}": f"{name} ({_version(plugins, family, name)})"
            for family, name in sorted(chosen.items())
            if family in FAMILIES and family not in harmless
        },
        **{
            f"the options of {key}": dict(values) for key, values in _options(config, plugins, harmless | {"executors"})
        },
        "the number of layers with K/V": len(caches),
        "the layout of K/V": sorted({_layout(layer, is_cut) for layer in caches}),
        **({} if is_cut else {"--tensor-parallel-size": tp.size}),
    }
    return {
        words: value if isinstance(value, str) else json.dumps(value, default=str) for words, value in found.items()
    }


def _options(
    config: Config, plugins: PluginSet, harmless: frozenset[str]
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The options of plugins that may change K/V, by plugin: of none of these families."""
    for key, values in sorted(config.plugin_options.items()):
        family, _, name = key.partition(".")
        item = plugins.by_family.get(family, {}).get(name)
        if family not in harmless and getattr(item and item.declaration, "changes_kv", True):
            yield key, values


def _layout(layer: AttentionLayer, is_cut: bool) -> str:
    """The spec of a layer, the shape of its blocks and their type; is_cut: of one K/V head."""
    assert layer.kv_cache is not None
    spec, shape = layer.kv_spec, list(layer.kv_cache.shape[1:])
    if is_cut and layer.head_dim is not None:
        spec, shape[layer.head_dim] = replace(spec, num_kv_heads=1), 1
    return f"{spec} {shape} {layer.kv_cache.dtype}"


def _version(plugins: PluginSet, family: str, name: str) -> str:
    item = plugins.by_family.get(family, {}).get(name)
    return f"{item.package} {item.version} {item.declaration.load}" if item is not None else ""
