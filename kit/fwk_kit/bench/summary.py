"""From replies to figures: throughput, percentiles, goodput."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fwk_kit.bench.load import Reply

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Goals:
    """A service-level objective, milliseconds each; None is no goal. A request is good when it meets all of them."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    def met_by(self, reply: Reply) -> bool:
        """Whether a reply was good."""
        got = {"ttft": reply.ttft, "tpot": reply.tpot or 0.0, "latency": reply.latency}
        return all(limit is None or 1e3 * got[name] <= limit for name, limit in asdict(self).items())


@dataclass(frozen=True, slots=True)
class Drafting:
    """What speculative decoding did in a run, by the server's own counters."""

    num_drafts: int
    """Drafted tokens that were verified."""
    accepted_length: float
    """Tokens of a step with drafts, on average: those accepted, and the one the model adds."""
    rates: tuple[float, ...]
    """In which part of these steps at least one draft was accepted, at least two, ..."""
    draft_seconds: float | None
    verify_seconds: float | None

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Drafting | None:
        """From two readings of ``/metrics``; None without drafts."""

        def grown(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        steps = grown("num_drafts_total")
        if steps <= 0:
            return None
        by_position: list[float] = []
        while (name := f"num_accepted_tokens_per_pos_total/{len(by_position)}") in after:
            by_position.append(grown(name) / steps)
        has_times = "draft_seconds_total" in after
        return cls(
            num_drafts=int(grown("num_draft_tokens_total")),
            accepted_length=1 + grown("num_accepted_draft_tokens_total") / steps,
            rates=tuple(by_position),
            draft_seconds=grown("draft_seconds_total") if has_times else None,
            verify_seconds=grown("verify_seconds_total") if has_times else None,
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """One run of one workload. Times are milliseconds, by percentile; rates are a second's."""

    workload: str
    num_requests: int
    num_failed: int
    seconds: float
    output_tokens: int
    input_tokens: int
    output_rate: float
    total_rate: float
    request_rate: float
    goodput: float | None
    """Good requests a second, when there are goals (DistServe, Zhong et al. 2024)."""
    ttft: dict[str, float] = field(default_factory=dict[str, float])
    tpot: dict[str, float] = field(default_factory=dict[str, float])
    itl: dict[str, float] = field(default_factory=dict[str, float])
    """Gaps between pieces of text, over all requests."""
    latency: dict[str, float] = field(default_factory=dict[str, float])
    num_valid: int | None = None
    first_error: str | None = None
    drafting: Drafting | None = None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(workload: str, replies: Sequence[Reply], seconds: float, goals: Goals | None = None) -> Summary:
    """Failed requests count as such, and in no other figure."""
    good = [reply for reply in replies if reply.error is None]
    outputs, inputs = sum(r.num_output for r in good), sum(r.num_input for r in good)
    gaps = [after - before for r in good for before, after in zip(r.times, r.times[1:], strict=False)]
    checked = [r.is_valid for r in good if r.is_valid is not None]
    return Summary(
        workload=workload,
        num_requests=len(replies),
        num_failed=len(replies) - len(good),
        seconds=seconds,
        output_tokens=outputs,
        input_tokens=inputs,
        output_rate=outputs / seconds,
        total_rate=(outputs + inputs) / seconds,
        request_rate=len(good) / seconds,
        goodput=sum(map(goals.met_by, good)) / seconds if goals is not None and goals != Goals() else None,
        ttft=percentiles([r.ttft for r in good]),
        tpot=percentiles([r.tpot for r in good if r.tpot is not None]),
        itl=percentiles(gaps),
        latency=percentiles([r.latency for r in good]),
        num_valid=sum(checked) if checked else None,
        first_error=next((r.error for r in replies if r.error is not None), None),
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """``p50`` and so on, in milliseconds, between the two nearest values; empty when there are none."""
    return {f"p{p}": 1e3 * percentile(seconds, p) for p in PERCENTILES} if seconds else {}


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile, linear between order statistics."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
