"""A run's figures under the names of ``vllm bench serve --save-result --save-detailed``, for what reads those."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from fwk_kit.bench.load import Reply
from fwk_kit.bench.summary import PERCENTILES, Goals, percentile, summarise
from fwk_kit.bench.workload import Workload


def vllm_result(
    workload: Workload, replies: Sequence[Reply], seconds: float, goals: Goals, model: str | None
) -> dict[str, Any]:
    """The object of the file. Times of requests are seconds, those of statistics milliseconds.

    A gap is one between pieces of a stream, which may hold several tokens, there as here. Failed requests have lengths
    and times of 0, and count in no statistic.
    """
    told = summarise(workload.name, replies, seconds, goals)
    good = [reply for reply in replies if reply.error is None]
    gaps = [_gaps(reply) for reply in replies]
    measures = {
        "ttft": [reply.ttft for reply in good],
        "tpot": [reply.tpot for reply in good if reply.tpot is not None],
        "itl": [gap for own in gaps for gap in own],
        "e2el": [reply.latency for reply in good],
    }
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": workload.name,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(replies),
        "request_rate": "inf" if workload.rate is None else workload.rate,
        "burstiness": 1.0,
        "max_concurrency": workload.concurrency if workload.rate is None else None,
        "duration": seconds,
        "completed": len(good),
        "failed": told.num_failed,
        "total_input_tokens": told.input_tokens,
        "total_output_tokens": told.output_tokens,
        "request_throughput": told.request_rate,
        "request_goodput": told.goodput,
        "output_throughput": told.output_rate,
        "total_token_throughput": told.total_rate,
        "input_lens": [reply.num_input for reply in replies],
        "output_lens": [reply.num_output for reply in replies],
        "ttfts": [reply.ttft if reply.error is None else 0.0 for reply in replies],
        "itls": gaps,
        "latencies": [reply.latency if reply.error is None else 0.0 for reply in replies],
        "start_times": [reply.sent for reply in replies],
        "generated_texts": [reply.text for reply in replies],
        "errors": [reply.error or "" for reply in replies],
    }
    for name, values in measures.items():
        result |= _statistics(name, values)
    return result


def _gaps(reply: Reply) -> list[float]:
    """Seconds between a reply's pieces of text."""
    if reply.error is not None:
        return []
    return [after - before for before, after in zip(reply.times, reply.times[1:], strict=False)]


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles in milliseconds; 0 where nothing was measured."""
    values = [1e3 * value for value in seconds] or [0.0]
    told = {
        f"mean_{name}_ms": math.fsum(values) / len(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
    }
    return told | {f"p{p}_{name}_ms": percentile(values, p) for p in PERCENTILES}
