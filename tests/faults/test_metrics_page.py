"""Check 45: what scrapers read is right, falls never where it may only grow, and has a bounded number of series."""

from __future__ import annotations

import random
import re

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.helpers.client import connect, together
from tests.helpers.rig import Server

NAME = re.compile(r"fwk:[a-z0-9_]+")
GAUGES = {"fwk:num_requests_running", "fwk:num_requests_waiting", "fwk:kv_cache_usage_perc"}
LABELS = {"model_name", "finished_reason", "le"}


def scrape(server: Server) -> dict[str, Metric]:
    """Families by name, once the page has been held against the rules of its format."""
    reply = server.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.text.splitlines()
    assert reply.text.endswith("\n")
    families = {family.name: family for family in parse_text(reply.text)}
    for kind in ("HELP", "TYPE"):
        told = [line.split()[2] for line in lines if line.startswith(f"# {kind} ")]
        assert len(told) == len(set(told)) == len(families), f"one {kind} for each"
    seen: set[tuple[str, ...]] = set()
    for family in families.values():
        assert NAME.fullmatch(family.name), family.name
        assert family.documentation
        assert family.type == ("gauge" if family.name in GAUGES else family.type)
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            key = (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items())))
            assert key not in seen, f"{key} twice"
            seen.add(key)
            assert set(sample.labels) <= LABELS
            assert sample.value >= 0
            if family.type == "counter":
                assert sample.name.endswith("_total")
        if family.type == "histogram":
            check_histogram(family)
    return families


def check_histogram(family: Metric) -> None:
    buckets = [s for s in family.samples if s.name.endswith("_bucket")]
    assert buckets[-1].labels["le"] == "+Inf"
    bounds = [float(s.labels["le"]) for s in buckets]
    assert bounds == sorted(bounds)
    counts = [s.value for s in buckets]
    assert counts == sorted(counts)
    (count,) = (s.value for s in family.samples if s.name.endswith("_count"))
    assert count == counts[-1]


def growing(families: dict[str, Metric]) -> dict[tuple[str, str], float]:
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in families.values()
        if family.type != "gauge"
        for sample in family.samples
    }


async def test_the_page(fake: Server) -> None:
    dice = random.Random(45)
    before = scrape(fake)
    async with connect(fake) as client:
        for _ in range(5):
            names = [f"model-{dice.random()}" for _ in range(40)]
            work = [client.post({"prompt": "Hi", "model": name, "request_id": name}) for name in names]
            work += [client.post({"prompt": "Hi", "max_tokens": 5, "request_id": name}) for name in names]
            replies = await together(work)
            assert sorted({status for status, _ in replies}) == [200, 404]
            after = scrape(fake)
            old, new = growing(before), growing(after)
            assert old.keys() == new.keys(), "a series for what clients wrote"
            assert all(new[key] >= old[key] for key in old)
            assert sum(new.values()) > sum(old.values())
            before = after
    fake.check_invariants()
    for name in GAUGES:
        assert [sample.value for sample in scrape(fake)[name].samples] == [0], name
    text = fake.get("/metrics").text
    assert not re.search(r"model-0\.", text + fake.log)
