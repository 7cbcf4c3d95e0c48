"""A plugin's options reach its object, of whatever family it is and in whichever process it lives."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.packages import write_package
from tests.helpers.rig import Server, write_model

from fwk.plugins import FAMILIES

DERIVED = {
    "attention": ("fwk_attention.torch_sdpa", "--attention-backend"),
    "quant": ("fwk_quant.none", "--quantization"),
    "models": ("fwk_models.llama", "--model-impl"),
    "schedulers": ("fwk_schedulers.fcfs", "--schedule-policy"),
    "speculative": ("fwk_speculative.ngram", "--speculative-algorithm"),
    "lora": ("fwk_lora.torch_lora", "--lora-backend"),
    "lora_sources": ("fwk_lora.local", ""),
    "cache": ("fwk_cache.hierarchical", "--prefix-cache"),
    "cache_tiers": ("fwk_cache.host", "--cache-tiers"),
    "samplers": ("fwk_sampling.torch_sampler", "--sampling-backend"),
    "operators": ("fwk_operators.torch_ops", "--operator-backend"),
    "grammar": ("fwk_grammar.llguidance", "--grammar-backend"),
    "tool_parsers": ("fwk_parsers.hermes", "--tool-call-parser"),
    "reasoning_parsers": ("fwk_parsers.think", "--reasoning-parser"),
    "devices": ("fwk_devices.cpu", "--device"),
    "executors": ("fwk_executors.inprocess", "--executor"),
    "load_balancers": ("fwk_balancers.round_robin", "--load-balance-method"),
    "loaders": ("fwk_loaders.dummy", "--load-format"),
    "model_sources": ("fwk_loaders.local", ""),
}
"""Of each family a plugin of ours to derive from, and the flag that selects one."""

OWN = {
    "dialects": "DialectSpec", "logits_processors": "LogitsProcessorSpec", "observers": "ObserverSpec",
    "features": "FeatureSpec", "engine_pools": "EnginePoolSpec",
}  # fmt: skip
"""Families whose plugins stand for themselves: derived ones would collide."""

NOT_YET = {"kv_transfer", "multimodal", "moe", "expert_placers"}
"""Nothing of these is built for a dense text model on one engine."""

DECLARATIONS = """
import dataclasses, importlib, sys
import fwk
from fwk import Options, hookimpl, option

def options(family, parent):
    name = "probe_" + family
    fields = {"__annotations__": {name: int}, name: option(0, "Reaches " + family), "__module__": __name__}
    return type(family.title() + "Options", (parent or Options,), fields)

def declare(hook, family, module):
    def declared():
        base = getattr(importlib.import_module(module), hook)()[0]
        own = options(family, base.options)
        rank = 200 if family == "model_sources" else -99
        load = "probe_objects:" + family
        return [dataclasses.replace(base, name="probe", load=load, options=own, rank=rank, switches=(), enabled_by=())]
    setattr(sys.modules[__name__], hook, hookimpl(declared))

def alone(hook, family, spec):
    def declared():
        place = "worker" if family == "features" else "load"
        return [getattr(fwk, spec)(name="probe", **{place: "probe_objects:" + family}, options=options(family, None))]
    setattr(sys.modules[__name__], hook, hookimpl(declared))
"""

OBJECTS = """
import importlib, os
BASES = {bases!r}

def record(family, value):
    with open(os.environ["PROBE_FILE"], "a") as file:
        file.write(f"{{family}} {{value}}\\n")

def __getattr__(family):
    hook, module = BASES[family]
    if module:
        load = getattr(importlib.import_module(module), hook)()[0].load
        base = getattr(importlib.import_module(load.partition(":")[0]), load.partition(":")[2])
    else:
        from fwk.interfaces import dialect, engine_pool, feature, observer, sampling
        base = {{
            "dialects": dialect.Dialect, "observers": observer.Observer, "features": feature.WorkerPart,
            "logits_processors": sampling.LogitsProcessor, "engine_pools": engine_pool.EnginePool,
        }}[family]
    class Probe(base):
        def __init__(self, context):
            record(family, getattr(context.options, "probe_" + family))
            super().__init__(context)
        if family == "dialects":
            def routes(self, app): ...
        if family == "logits_processors":
            def add(self, slot, params): return False
            def remove(self, slot): ...
            def apply(self, logits, view): return logits
        if family == "model_sources":
            def fetch(self, *arguments): return None
    return Probe
"""


def install(folder: Path) -> None:
    """A package with a plugin of every family."""
    lines = [f"declare({FAMILIES[f].hook!r}, {f!r}, {module!r})" for f, (module, _) in DERIVED.items()]
    lines += [f"alone({FAMILIES[f].hook!r}, {f!r}, {spec!r})" for f, spec in OWN.items()]
    write_package(folder, "probe", {"probe_all": "\n".join([DECLARATIONS, *lines, ""])})
    bases = {f: (FAMILIES[f].hook, module) for f, (module, _) in DERIVED.items()} | {f: ("", "") for f in OWN}
    (folder / "probe_objects.py").write_text(OBJECTS.format(bases=bases))


def test_options_reach_the_object_of_every_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*DERIVED, *OWN, *NOT_YET} == set(FAMILIES)
    install(tmp_path)
    numbers = {family: 100 + i for i, family in enumerate([*DERIVED, *OWN])}
    flags = [word for _, flag in DERIVED.values() if flag for word in (flag, "probe")] + ["--enable-lora"]
    flags += [f"--probe-{family.replace('_', '-')}={number}" for family, number in numbers.items()]
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags += ["--chat-template", str(tmp_path / "template")]
    reached = tmp_path / "reached"
    monkeypatch.setenv("PROBE_FILE", str(reached))
    server = Server(write_model(tmp_path / "tiny"), *flags, python_path=str(tmp_path))
    try:
        server.start()
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 2,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "auto",
        }
        server.post(body, "/v1/chat/completions")
        server.post({"prompt": "x", "max_tokens": 2, "regex": "a"})
    finally:
        server.close()
    found = {tuple(line.split()) for line in reached.read_text().splitlines()}
    assert found == {(family, str(number)) for family, number in numbers.items()}
