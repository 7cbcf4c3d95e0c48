"""The Prometheus observer: what is counted, and how it is written."""

import base64
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families as parse_text
from pydantic import ValidationError

from fwk.interfaces.observer import ObserverContext, RequestRecord
from fwk.types import EngineStats
from fwk_observability.prometheus import PrometheusOptions
from fwk_observability.prometheus.observer import PrometheusObserver

MODEL = 'org/"tiny"\n'


@pytest.fixture
def observer():
    return PrometheusObserver(ObserverContext(MODEL, PrometheusOptions(bucket_inter_token_latency=(0.01, 0.1, 1))))


async def scrape(observer, accept="text/plain"):
    app = FastAPI()
    observer.routes(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        reply = await client.get("/metrics", headers={"accept": accept})
    assert reply.status_code == 200
    return reply


async def samples(observer):
    """name and labels but the model's -> value"""
    found = {}
    for family in parse_text((await scrape(observer)).text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            rest = tuple(value for name, value in sample.labels.items() if name != "model_name")
            found[(sample.name, *rest)] = sample.value
    return found


def request(**fields):
    return RequestRecord("id", "", 100, arrived=1000.0, **fields)


def receive(observer, record, times, num_tokens=1, previous=None):
    """Tokens of one sequence, told as the server tells them: the record counts them first."""
    previous = record.arrived if previous is None else previous
    for now in times:
        record.num_output_tokens += num_tokens
        record.first_token = record.first_token or now
        record.last_token = now
        observer.tokens_received(record, num_tokens, now - previous)
        previous = now


async def test_every_metric_is_there_from_the_start(observer):
    found = await samples(observer)
    names = {key[0] for key in found}
    expected = """degraded num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
        prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total engine_steps_total
        request_success_total time_to_first_token_seconds_bucket inter_token_latency_seconds_count
        e2e_request_latency_seconds_sum request_prompt_tokens_bucket request_generation_tokens_count"""
    for name in expected.split():
        assert f"fwk:{name}" in names
    assert all(value == 0 for value in found.values())
    assert not any(name.endswith("_created") for name in names)


async def test_gauges_follow_the_engine(observer):
    observer.step_finished(EngineStats(num_running=3, num_waiting=2, num_blocks=100, num_held_blocks=25))
    found = await samples(observer)
    assert found[("fwk:num_requests_running",)] == 3
    assert found[("fwk:num_requests_waiting",)] == 2
    assert found[("fwk:kv_cache_usage_perc",)] == 0.25
    observer.step_finished(EngineStats(num_blocks=100))
    found = await samples(observer)
    assert found[("fwk:num_requests_running",)] == found[("fwk:kv_cache_usage_perc",)] == 0
    assert found[("fwk:degraded",)] == 0
    observer.context = replace(observer.context, degraded=lambda: "a replica is started again")
    assert (await samples(observer))[("fwk:degraded",)] == 1


async def test_counters_survive_an_engine_restart(observer):
    for tokens in (10, 25, 25, 5, 7):  # 25, then a new engine counts 5 and 7
        observer.step_finished(EngineStats(generation_tokens=tokens, prompt_tokens=2 * tokens, cached_prompt_tokens=1))
    found = await samples(observer)
    assert found[("fwk:generation_tokens_total",)] == 32
    assert found[("fwk:prompt_tokens_total",)] == found[("fwk:prefix_cache_queries_total",)] == 64
    assert found[("fwk:prefix_cache_hits_total",)] == 1


async def test_the_first_token_and_those_between(observer):
    receive(observer, request(), [1000.3, 1000.35, 1000.36])
    found = await samples(observer)
    assert found[("fwk:time_to_first_token_seconds_count",)] == 1
    assert found[("fwk:time_to_first_token_seconds_sum",)] == pytest.approx(0.3)
    assert found[("fwk:inter_token_latency_seconds_count",)] == 2
    assert found[("fwk:inter_token_latency_seconds_sum",)] == pytest.approx(0.06)
    assert found[("fwk:inter_token_latency_seconds_bucket", "0.01")] in (0, 1)
    assert found[("fwk:inter_token_latency_seconds_bucket", "0.1")] == 2
    assert found[("fwk:inter_token_latency_seconds_bucket", "+Inf")] == 2


async def test_a_request_has_one_first_token(observer):
    record = request()
    receive(observer, record, [1000.5])
    receive(observer, record, [1000.5])  # the second sequence's first, in the same step
    receive(observer, record, [1000.9])  # a third one's, later
    receive(observer, record, [1001.0], previous=1000.9)
    found = await samples(observer)
    assert found[("fwk:time_to_first_token_seconds_count",)] == 1
    assert found[("fwk:inter_token_latency_seconds_count",)] == 1


async def test_tokens_that_come_together_share_the_time(observer):
    record = request()
    receive(observer, record, [1000.5, 1000.7], num_tokens=4)
    found = await samples(observer)
    assert found[("fwk:inter_token_latency_seconds_count",)] == 4
    assert found[("fwk:inter_token_latency_seconds_sum",)] == pytest.approx(0.2)
    assert found[("fwk:inter_token_latency_seconds_bucket", "0.1")] == 4


@pytest.mark.parametrize(
    ("reasons", "counted"),
    [
        (("stop",), "stop"),
        (("stop", "length"), "length"),
        (("length", "error", "stop"), "error"),
        (("stop", "abort"), "abort"),
        ((), "abort"),
        (("vanished",), "other"),
    ],
)
async def test_a_request_ends_once(observer, reasons, counted):
    observer.request_finished(request(finish_reasons=reasons, finished=1002.0, num_output_tokens=7))
    found = await samples(observer)
    ends = {key[1]: value for key, value in found.items() if key[0] == "fwk:request_success_total"}
    assert ends == {reason: float(reason == counted) for reason in ("stop", "length", "abort", "error", "other")}
    assert found[("fwk:e2e_request_latency_seconds_sum",)] == 2.0
    assert found[("fwk:request_prompt_tokens_sum",)] == 100
    assert found[("fwk:request_generation_tokens_sum",)] == 7


async def test_the_number_of_series_never_grows(observer):
    before = set(await samples(observer))
    for i in range(100):
        record = request(finish_reasons=(f"reason {i}",), finished=1001.0)
        record.label = f"label {i}"
        observer.request_arrived(record)
        receive(observer, record, [1000.0 + i])
        observer.request_finished(record)
        observer.step_finished(EngineStats(steps=i))
    assert set(await samples(observer)) == before


async def test_a_clock_that_goes_back_does_not_make_sums_fall(observer):
    observer.request_finished(request(finish_reasons=("stop",), finished=999.0))
    assert (await samples(observer))[("fwk:e2e_request_latency_seconds_sum",)] == 0


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "application/openmetrics-text; version=1.0.0",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.5",
        "text/plain;version=0.0.4;q=0.2",
    ],
)
async def test_names_keep_their_colon_whoever_asks(observer, accept):
    observer.step_finished(EngineStats(steps=3))
    reply = await scrape(observer, accept)
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(parse_text(reply.text))
    assert {family.type for family in families} == {"gauge", "counter", "histogram"}
    assert all(sample.name.startswith("fwk:") for family in families for sample in family.samples)


async def test_two_observers_share_nothing(observer):
    observer.step_finished(EngineStats(steps=3))
    other = PrometheusObserver(ObserverContext(MODEL))
    assert (await samples(other))[("fwk:engine_steps_total",)] == 0


@pytest.mark.parametrize("bounds", [(), (0.2, 0.1), (0.1, 0.1), (0.0, 1.0), (-1.0,), (float("inf"),), (float("nan"),)])
def test_buckets_are_checked(bounds):
    with pytest.raises(ValidationError):
        PrometheusOptions(bucket_time_to_first_token=bounds)


@pytest.mark.parametrize(
    ("rule", "bounds"),
    [
        (["custom", "30", "10", "20", "10"], (10, 20, 30)),
        (["tse", "100", "2", "6"], (92, 96, 98, 100, 102, 104, 108)),
        (["tse", "3", "2", "4"], (1, 3, 5, 7)),
        ([5, 9], (5, 9)),
    ],
)
def test_buckets_of_tokens_by_rule(rule, bounds):
    assert PrometheusOptions(prompt_tokens_buckets=rule).prompt_tokens_buckets == bounds
    default = PrometheusOptions.model_fields["generation_tokens_buckets"].default
    assert PrometheusOptions(generation_tokens_buckets="default").generation_tokens_buckets == default


async def test_tokens_are_counted_in_the_buckets_given():
    observer = PrometheusObserver(ObserverContext(MODEL, PrometheusOptions(prompt_tokens_buckets=("custom", 99, 100))))
    observer.request_finished(request(finished=1001.0))
    found = await samples(observer)
    counts = {key[1]: value for key, value in found.items() if key[0] == "fwk:request_prompt_tokens_bucket"}
    assert counts == {"99.0": 0, "100.0": 1, "+Inf": 1}


@pytest.mark.parametrize(
    "given",
    [
        {"prompt_tokens_buckets": ("tse", 100, 1, 4)},
        {"prompt_tokens_buckets": ("tse", 100, 2)},
        {"metric_gateway": "ftp://host"},
        {"metric_gateway": "http://user:word@host:9091"},
        {"metric_gateway": "host:9091", "metric_gateway_grouping_key": ("job=x",)},
        {"metric_gateway": "host:9091", "metric_gateway_grouping_key": ("a=x", "a=y")},
        {"metric_gateway": "host:9091", "metric_gateway_credential": "nobody"},
    ],
)
def test_what_cannot_be_pushed_or_counted_is_refused(given):
    with pytest.raises(ValidationError):
        PrometheusOptions(**given)


def test_metrics_are_pushed_to_a_gateway(gateway):
    address, received = gateway
    options = PrometheusOptions(
        metric_gateway=address.removeprefix("http://"),
        metric_gateway_job_name="chat",
        metric_gateway_grouping_key=("instance=a/1",),
        metric_gateway_push_interval=3600,
        metric_gateway_credential="me:se:cret",
    )
    observer = PrometheusObserver(ObserverContext(MODEL, options))
    observer.step_finished(EngineStats(num_running=3, generation_tokens=7))
    observer.close()
    [(method, path, authorization, body)] = received
    assert (method, path) == ("PUT", "/metrics/job/chat/instance@base64/YS8x")
    assert base64.b64decode(authorization.removeprefix("Basic ")) == b"me:se:cret"
    pushed = {sample.name: sample.value for family in parse_text(body) for sample in family.samples}
    assert (pushed["fwk:num_requests_running"], pushed["fwk:generation_tokens_total"]) == (3, 7)


def test_a_gateway_that_is_away_is_warned_of_once(gateway, caplog):
    address, received = gateway
    options = PrometheusOptions(metric_gateway=address, metric_gateway_push_interval=3600)
    observer = PrometheusObserver(ObserverContext(MODEL, options))
    received.is_refusing = True
    for _ in range(3):
        observer._push.push()
    received.is_refusing = False
    observer.close()
    texts = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in texts] == ["metrics cannot be pushed to http", "metrics are pushed to http"]
    assert len(received) == 1


class Received(list):
    is_refusing = False


@pytest.fixture
def gateway():
    """A server that takes what is pushed, as a push gateway does."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            if not received.is_refusing:
                received.append((self.command, self.path, self.headers.get("authorization", ""), body))
            self.send_response(503 if received.is_refusing else 200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


async def test_drafts_are_counted_by_position(observer):
    observer.step_finished(EngineStats(verifications=4, accepted_by_position=(3, 1)))
    observer.step_finished(EngineStats(verifications=1, accepted_by_position=(1,)))  # of an engine that began again
    found = await samples(observer)
    assert found[("fwk:num_drafts_total",)] == 5
    assert found[("fwk:num_accepted_tokens_per_pos_total", "0")] == 4
    assert found[("fwk:num_accepted_tokens_per_pos_total", "1")] == 1


def labelled(**options):
    names = ("team", "region")
    return PrometheusObserver(ObserverContext(MODEL, PrometheusOptions(
        tokenizer_metrics_allowed_custom_labels=names, **options
    )))  # fmt: skip


def brings(header):
    return request(headers={"x-custom-labels": header}, finish_reasons=("stop",))


async def finished_by(observer):
    """team and region -> requests that ended with stop"""
    return {
        (sample.labels["team"], sample.labels["region"]): sample.value
        for family in parse_text((await scrape(observer)).text)
        for sample in family.samples
        if sample.name == "fwk:request_success_total" and sample.labels["finished_reason"] == "stop"
    }


async def test_requests_count_for_the_labels_they_bring():
    observer = labelled()
    assert observer.wants_headers == {"x-custom-labels"}
    for header in (
        '{"team": "a", "region": "eu"}',
        '{"team": "a", "region": "eu", "secret": "x"}',
        '{"team": "b"}',
        "",
    ):
        observer.request_finished(brings(header))
    assert await finished_by(observer) == {("a", "eu"): 2, ("b", ""): 1, ("", ""): 1}
    record = brings('{"team": "b"}')
    receive(observer, record, [1000.5])
    page = (await scrape(observer)).text
    assert "secret" not in page
    [count] = [
        line
        for line in page.splitlines()
        if line.startswith("fwk:time_to_first_token_seconds_count") and 'team="b"' in line
    ]
    assert count.endswith(" 1.0")


@pytest.mark.parametrize(
    "header",
    ["{", "[]", "1", '{"team": 1}', '{"team": "' + "x" * 65 + '"}', '{"team": "a\\nb"}', "[" * 2000, " " * 3000],
)
async def test_a_header_that_is_no_object_of_short_texts_brings_none(header):
    observer = labelled()
    observer.request_finished(brings(header))
    assert await finished_by(observer) == {("", ""): 1}


async def test_clients_cannot_make_more_sets_than_allowed():
    observer = labelled(tokenizer_metrics_max_label_sets=3)
    for i in range(500):
        observer.request_finished(brings(f'{{"team": "{i}"}}'))
    observer.request_finished(brings('{"team": "1"}'))
    expected = {("", ""): 0, ("0", ""): 1, ("1", ""): 2, ("2", ""): 1, ("other", "other"): 497}
    assert await finished_by(observer) == expected


@pytest.mark.parametrize(
    "names", [("le",), ("model_name",), ("a-b",), ("a", "a"), ("1a",), tuple(f"n{i}" for i in range(17))]
)
def test_names_of_labels_are_checked(names):
    with pytest.raises(ValidationError):
        PrometheusOptions(tokenizer_metrics_allowed_custom_labels=names)


class Numbers(msgspec.Struct):
    """What a feature counts."""

    num_open: Annotated[int, msgspec.Meta(description="Open now.")] = 0
    letters: int = 0


async def test_numbers_of_features_are_metrics_from_the_start():
    observer = PrometheusObserver(ObserverContext(MODEL, PrometheusOptions(), feature_stats={"mine": Numbers}))
    assert (await samples(observer))["fwk:letters_total",] == 0
    observer.step_finished(EngineStats(features={"mine": {"num_open": 3, "letters": 10}}))
    observer.step_finished(EngineStats(features={"mine": {"num_open": 2, "letters": 4}}))  # of another engine
    found = await samples(observer)
    assert (found["fwk:num_open",], found["fwk:letters_total",]) == (2, 14)
    page = (await scrape(observer)).text
    assert "# HELP fwk:num_open Open now." in page
    assert "letters of the feature mine." in page


async def test_numbers_of_one_name_are_told_apart_by_their_features():
    """Two samples of one name and the same labels make a scraper refuse the page."""

    class Others(msgspec.Struct):
        letters: int = 0
        prompt_tokens: int = 0

    of = {"mine": Numbers, "other": Others}
    observer = PrometheusObserver(ObserverContext(MODEL, PrometheusOptions(), feature_stats=of))
    told = {"mine": {"num_open": 1, "letters": 2}, "other": {"letters": 3, "prompt_tokens": 4}}
    observer.step_finished(EngineStats(prompt_tokens=5, features=told))
    found = await samples(observer)
    assert (found["fwk:mine_letters_total",], found["fwk:other_letters_total",]) == (2, 3)
    assert (found["fwk:prompt_tokens_total",], found["fwk:other_prompt_tokens_total",]) == (5, 4)
    assert found["fwk:num_open",] == 1
    lines = [line.rsplit(" ", 1)[0] for line in (await scrape(observer)).text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
