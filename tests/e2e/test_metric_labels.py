"""Metrics of a running server by the labels that requests bring."""

from __future__ import annotations

import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.helpers.http import NO_TLS
from tests.helpers.rig import Server
from tests.helpers.servers import Start


def ask(server: Server, labels: dict[str, str] | None, **body: object) -> None:
    headers = {} if labels is None else {"X-Team-Labels": json.dumps(labels)}
    reply = httpx.post(
        server.url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 3, **body}, headers=headers, verify=NO_TLS
    )
    assert reply.status_code == 200, reply.text


def counts(server: Server, name: str) -> dict[str, float]:
    """team -> value"""
    families = parse_text(server.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    found: dict[str, float] = {}
    for sample in samples:
        found[sample.labels["team"]] = found.get(sample.labels["team"], 0) + sample.value
    return found


@pytest.mark.sweep
def test_requests_are_counted_by_their_labels(spawn: Start) -> None:
    server = spawn(
        "--tokenizer-metrics-allowed-custom-labels", "team",
        "--tokenizer-metrics-custom-labels-header", "x-team-labels",
    )  # fmt: skip
    before = counts(server, "fwk:request_success_total")
    assert set(before) == {""}
    for labels, stream in (({"team": "a"}, False), ({"team": "a", "other": "x"}, True), ({"team": "b"}, False)):
        ask(server, labels, stream=stream)
    ask(server, None)
    found = counts(server, "fwk:request_success_total")
    assert (found["a"], found["b"], found[""] - before[""]) == (2, 1, 1)
    assert counts(server, "fwk:time_to_first_token_seconds_count")["a"] == 2
    assert counts(server, "fwk:request_generation_tokens_sum")["b"] == 3
