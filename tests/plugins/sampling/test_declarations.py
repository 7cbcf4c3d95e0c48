"""Declarations are light, and what they name can be loaded."""

from __future__ import annotations

import importlib

import pytest

from fwk.interfaces.declaration import Declaration
from fwk.interfaces.prefix_cache import PrefixCache
from fwk.interfaces.sampling import LogitsProcessor, LogitsProcessorSpec, Sampler
from fwk.interfaces.schedule import SchedulePolicy
from fwk_cache import none as cache_none
from fwk_cache import radix
from fwk_sampling import processors, torch_sampler
from fwk_schedulers import fcfs, lpm

DECLARED: list[tuple[Declaration, type]] = [
    *((item, PrefixCache) for item in [*cache_none.prefix_caches(), *radix.prefix_caches()]),
    *((item, SchedulePolicy) for item in [*fcfs.schedule_policies(), *lpm.schedule_policies()]),
    *((item, LogitsProcessor) for item in processors.logits_processors()),
    *((item, Sampler) for item in torch_sampler.samplers()),
]


@pytest.mark.parametrize(("item", "interface"), DECLARED, ids=lambda x: getattr(x, "name", ""))
def test_the_declared_class_is_there_and_implements_its_interface(item: Declaration, interface: type) -> None:
    module, _, attribute = item.load.partition(":")
    assert issubclass(getattr(importlib.import_module(module), attribute), interface)
    assert item.summary.endswith(".")


def test_processors_come_in_the_order_the_interface_states() -> None:
    orders = {item.name: item.order for item in processors.logits_processors() if isinstance(item, LogitsProcessorSpec)}
    assert sorted(orders, key=lambda name: orders[name]) == [
        "logit_bias",
        "min_tokens",
        "bad_words",
        "allowed_token_ids",
        "penalties",
        "temperature",
        "truncation",
    ]
    assert len(set(orders.values())) == len(orders)
    assert (orders["penalties"], orders["temperature"], orders["truncation"]) == (200, 300, 400)
