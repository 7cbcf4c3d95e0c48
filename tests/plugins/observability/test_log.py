"""The log observer: statistics, lines of requests, and what stays out of them."""

from __future__ import annotations

import gc
import json
import logging
from typing import Any

import pytest
from tests.helpers.zygote import open_fwk

from fwk import SamplingParams
from fwk.interfaces.observer import ObserverContext, RequestRecord
from fwk.plugins import build_config, discover
from fwk.types import EngineStats, GrammarRequest
from fwk_kit.testing.serving import TINY, ask
from fwk_observability.log import LogOptions
from fwk_observability.log.observer import LogObserver

SECRET = "my cat is called Tiger"


def observer_with(**options: Any) -> LogObserver:
    decode = lambda ids: SECRET * len(ids)  # noqa: E731
    return LogObserver(ObserverContext("m", LogOptions(**{"log_stats_interval": 0, **options}), decode=decode))


def finished(**fields: Any) -> RequestRecord:
    known: dict[str, Any] = {
        "first_token": 100.25, "last_token": 101.25, "finished": 101.5, "num_output_tokens": 11, "cached_tokens": 4,
        "finish_reasons": ("stop",), "prompt_token_ids": [1, 2], "outputs": (SECRET,),
        "sampling": SamplingParams(temperature=0.5, stop=[SECRET], grammar=GrammarRequest("choice", f'["{SECRET}"]')),
    }  # fmt: skip
    return RequestRecord(
        **({"request_id": "id-1", "label": "", "num_prompt_tokens": 8, "arrived": 100.0} | known | fields)
    )


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "fwk.log")
    return lambda: [(record.getMessage(), getattr(record, "fields", {})) for record in caplog.records]


def test_a_request_is_one_line_with_its_times(lines: Any) -> None:
    observer_with(log_requests=True, log_requests_level=0).request_finished(finished())
    [(text, fields)] = lines()
    assert text == (
        "request id-1: text_completion, 8 prompt tokens (4 cached), 11 output tokens, ended by stop, "
        "first token 0.250 s, total 1.500 s, 10.0 tok/s"
    )
    assert fields["first_token_s"] == 0.25
    assert "sampling" not in fields


def test_users_words_stay_out_unless_asked_for(lines: Any) -> None:
    observer_with(log_requests=True).request_finished(finished())
    [(text, fields)] = lines()
    assert SECRET not in text
    assert SECRET not in json.dumps(fields)
    assert fields["sampling"]["temperature"] == 0.5
    assert fields["sampling"]["stop"] == "(hidden)"


def test_levels_two_and_three_write_content(lines: Any) -> None:
    observer_with(log_requests=True, log_requests_level=2, max_log_len=5).request_finished(finished())
    observer_with(log_requests=True, log_requests_level=3, max_log_len=5).request_finished(finished())
    (_, two), (_, three) = lines()
    assert two["outputs"] == [f"my ca... ({len(SECRET)} characters)"]
    assert (three["prompt"], three["outputs"]) == (SECRET * 2, [SECRET])


def test_content_is_wanted_only_where_it_is_written() -> None:
    assert observer_with(log_requests=True, log_requests_level=2).wants_content
    for options in ({}, {"log_requests": True}, {"log_requests_level": 3}):
        assert not observer_with(**options).wants_content


def test_nobody_forges_a_line(lines: Any) -> None:
    observer_with(log_requests=True).request_finished(finished(label="x\nfake line"))
    assert "\n" not in lines()[0][0]


def test_without_the_switch_there_is_no_line(lines: Any) -> None:
    observer_with().request_finished(finished())
    assert lines() == []


def test_statistics_are_of_the_time_between(lines: Any) -> None:
    observer = observer_with()
    start = observer._looked
    observer.step_finished(EngineStats(num_running=2, num_blocks=10, num_held_blocks=5, prompt_tokens=100, steps=3))
    observer.write_statistics(start + 10)
    observer.step_finished(
        EngineStats(
            num_running=1, num_waiting=3, num_blocks=10, num_held_blocks=1, prompt_tokens=300, cached_prompt_tokens=50,
            generation_tokens=500, draft_tokens=40, accepted_draft_tokens=10, preemptions=2, steps=9,
        )
    )  # fmt: skip
    observer.write_statistics(start + 20)
    first, second = (text for text, _ in lines())
    assert first == "running 2, waiting 0, in 10.0 tok/s, out 0.0 tok/s, KV cache 50.0%, prefix cache hits 0.0%"
    assert second == (
        "running 1, waiting 3, in 20.0 tok/s, out 50.0 tok/s, KV cache 10.0%, prefix cache hits 25.0%, "
        "drafts accepted 25.0%, pre-emptions 2"
    )


def test_an_idle_server_says_so_once(lines: Any) -> None:
    observer = observer_with()
    for second, stats in enumerate([EngineStats(num_running=1, steps=1), EngineStats(steps=1), EngineStats(steps=1)]):
        observer.step_finished(stats)
        observer.write_statistics(observer._looked + 10 + second)
    assert [text[:9] for text, _ in lines()] == ["running 1", "running 0"]


def test_a_restarted_engine_counts_from_nothing(lines: Any) -> None:
    observer = observer_with()
    observer.step_finished(EngineStats(num_running=1, generation_tokens=1000, steps=5))
    observer.write_statistics(observer._looked + 1)
    observer.step_finished(EngineStats(num_running=1, generation_tokens=30, steps=1))
    observer.write_statistics(observer._looked + 10)
    assert "out 3.0 tok/s" in lines()[1][0]


def test_the_end_has_totals(lines: Any) -> None:
    observer = observer_with()
    observer.request_finished(finished())
    observer.close()
    assert "1 requests, 8 prompt tokens, 11 output tokens" in lines()[-1][0]


def test_long_garbage_collections_are_warned_of(lines: Any) -> None:
    observer = observer_with(gc_warning_threshold_secs=1e-9)
    gc.collect()
    observer.close()
    gc.collect()
    found = [fields for _, fields in lines() if fields["event"] == "garbage_collection"]
    assert found
    assert found[-1]["generation"] == 2
    assert len([fields for fields in found if fields["generation"] == 2]) == 1


def test_other_servers_flags_mean_the_same() -> None:
    plugins = discover()
    config = build_config(plugins, {"--disable_log_stats": "true", "--enable-log-requests": "true"})
    assert config.plugin_options["observers.log"] == {"log_stats_interval": 0, "log_requests": "true"}


@pytest.mark.sweep
def test_a_server_writes_json_lines(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    words = f"serve {tmp_path} --load-format dummy --port 0 --max-total-tokens 2048 --api-key k3y --log-format json"
    more = "--log-requests --log-requests-level 3 --log-stats-interval 0.05"
    with open_fwk(*words.split(), *more.split()) as process:
        assert process.stderr is not None
        found = []
        for line in process.stderr:
            found.append(json.loads(line))
            if " serves " in found[-1]["message"]:
                break
        url = found[-1]["message"].split(" at ")[1].split()[0]
        body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True, "model": "k3y"}
        ask(url, "/v1/completions", body | {"model": str(tmp_path)}, key="k3y")
        process.terminate()
        found += [json.loads(line) for line in process.stderr]
        assert process.wait(30) == 0
    events = {line["event"]: line for line in found if "event" in line}
    assert set(events) == {"request", "statistics", "stopped"}
    assert events["request"]["output_tokens"] == 4
    assert events["request"]["prompt"].endswith("Hello")
    assert len(events["request"]["outputs"]) == 1
    assert all({"time", "level", "process", "logger", "message"} <= set(line) for line in found)
