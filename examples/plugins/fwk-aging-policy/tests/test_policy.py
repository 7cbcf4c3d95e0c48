"""The order itself, and the numbers at /aging/metrics."""

import urllib.request
from types import SimpleNamespace
from typing import Any

from fwk_aging_policy import AgingOptions
from fwk_aging_policy.policy import AgingPolicy

from fwk.interfaces.schedule import ScheduleContext
from fwk.testing import ask, serve_tiny


def waiting(num_tokens: int, arrival: float, num_preemptions: int = 0) -> Any:
    """A sequence that arrived at a time."""
    return SimpleNamespace(num_tokens=num_tokens, arrival=arrival, num_preemptions=num_preemptions)


def rank(rate: float, sequence: Any) -> tuple[bool, float]:
    return AgingPolicy(ScheduleContext(AgingOptions(aging_rate=rate))).rank(sequence, None)  # type: ignore[arg-type]


def test_short_prompts_come_first() -> None:
    assert rank(0.0, waiting(10, 9.0)) < rank(0.0, waiting(900, 0.0))


def test_waiting_counts() -> None:
    assert rank(100.0, waiting(900, 0.0)) < rank(100.0, waiting(10, 9.5))


def test_pre_empted_ones_go_on() -> None:
    assert rank(100.0, waiting(5000, 9.0, num_preemptions=1)) < rank(100.0, waiting(10, 0.0))


def test_the_metrics_count_first_tokens() -> None:
    with serve_tiny("--schedule-policy", "aging", "--aging-rate", "50", "--aging-metrics") as url:
        for _ in range(3):
            ask(url, "/v1/completions", {"prompt": "Hello", "max_tokens": 4})
        with urllib.request.urlopen(url + "/aging/metrics", timeout=10) as reply:
            text = reply.read().decode()
    assert 'fwk_aging_time_to_first_token_seconds_count{max_prompt_tokens="128"} 3' in text
