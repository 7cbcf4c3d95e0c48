"""Figures for people: tables, ratios, a picture; and for programs: JSON."""

from __future__ import annotations

import html
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import fwk
from fwk_kit.bench.summary import Drafting, Summary

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
HIGHER_IS_BETTER = frozenset({"output tokens/s", "requests/s", "goodput/s"})


def figures(summary: Summary) -> dict[str, float]:
    """What is compared: by name, one number each."""
    found = {"output tokens/s": summary.output_rate, "requests/s": summary.request_rate}
    if summary.goodput is not None:
        found["goodput/s"] = summary.goodput
    kinds = {"TTFT": summary.ttft, "TPOT": summary.tpot, "ITL": summary.itl, "latency": summary.latency}
    for name, values in kinds.items():
        for percentile in ("p50", "p99"):
            if percentile in values:
                found[f"{name} {percentile} ms"] = values[percentile]
    return found


def table(summary: Summary) -> str:
    """One run, as Markdown."""
    lines = [
        f"{summary.workload}: {summary.num_requests} requests in {summary.seconds:.2f} s, {summary.num_failed} failed",
        f"output {summary.output_rate:.1f} tokens/s, with input {summary.total_rate:.1f}; "
        f"{summary.request_rate:.2f} requests/s",
    ]
    if summary.goodput is not None:
        lines.append(f"goodput {summary.goodput:.2f} requests/s meet every goal")
    if summary.num_valid is not None:
        lines.append(f"{summary.num_valid} answers fit their schema")
    if summary.drafting is not None:
        lines.append(_drafts(summary.drafting, summary.seconds))
    if summary.first_error is not None:
        lines.append(f"first error: {summary.first_error}")
    lines += ["", "| ms | p50 | p90 | p99 |", "| --- | --- | --- | --- |"]
    rows = {"TTFT": summary.ttft, "TPOT": summary.tpot, "ITL": summary.itl, "latency": summary.latency}
    lines += [
        f"| {name} | {' | '.join(f'{v:.1f}' for v in values.values())} |" for name, values in rows.items() if values
    ]
    return "\n".join(lines)


def _drafts(found: Drafting, seconds: float) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in found.rates)
    line = f"drafts: {found.num_drafts} verified, {found.accepted_length:.2f} tokens a step; accepted by place {rates}"
    if found.draft_seconds is None or found.verify_seconds is None:
        return line
    shares = found.draft_seconds / seconds, found.verify_seconds / seconds
    return f"{line}; drafting {shares[0]:.0%}, verifying {shares[1]:.0%} of the time"


def comparison(runs: Mapping[str, Sequence[Summary]]) -> str:
    """Servers side by side, as Markdown: medians, and each repeat's ratio to the first server (above 1 is better)."""
    reference, *others = runs
    names = list(figures(runs[reference][0]))
    lines = [
        f"| measure | {' | '.join(runs)} | {' | '.join(f'{reference} to {name}' for name in others)} |",
        f"|{' --- |' * (1 + len(runs) + len(others))}",
    ]
    for name in names:
        values = {server: [figures(run).get(name) for run in own] for server, own in runs.items()}
        cells = [_median([v for v in own if v is not None]) for own in values.values()]
        cells += [_ratios(name, values[reference], values[other]) for other in others]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    failed = {server: sum(run.num_failed for run in own) for server, own in runs.items()}
    if any(failed.values()):
        lines.append(f"| failed requests | {' | '.join(map(str, failed.values()))} |{' |' * len(others)}")
    return "\n".join(lines)


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else "-"


def _ratios(name: str, ours: Sequence[float | None], theirs: Sequence[float | None]) -> str:
    """``1.50 (1.42 to 1.61)``: median and spread of the pairs, in the direction in which more is better."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b]
    ratios = [a / b if name in HIGHER_IS_BETTER else b / a for a, b in pairs]
    if not ratios:
        return "-"
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.2f}{spread}"


def write_json(path: Path, command: Sequence[str], content: Mapping[str, Any]) -> None:
    """The figures with all that is needed to understand them later."""
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "fwk": fwk.__version__,
    }
    text = json.dumps({"command": list(command), "machine": machine, **content}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def picture(title: str, runs: Mapping[str, Sequence[Summary]]) -> str:
    """Bars by measure and server, as SVG; each measure is scaled by its largest value."""
    names = [name for name in figures(next(iter(runs.values()))[0])]
    width, left, bar, gap = 760, 150, 16, 14
    height = 60 + len(names) * (bar * len(runs) + gap)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="15">{html.escape(title)}</text>',
    ]
    for index, server in enumerate(runs):
        x = left + index * 150
        parts.append(f'<rect x="{x}" y="30" width="10" height="10" fill="{COLORS[index % len(COLORS)]}"/>')
        parts.append(f'<text x="{x + 15}" y="40">{html.escape(server)}</text>')
    y = 56
    for name in names:
        medians = [statistics.median(figures(run).get(name, 0.0) for run in own) for own in runs.values()]
        most = max(medians) or 1.0
        parts.append(f'<text x="10" y="{y + 12}">{html.escape(name)}</text>')
        for index, value in enumerate(medians):
            length, color = (width - left - 90) * value / most, COLORS[index % len(COLORS)]
            parts.append(
                f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar - 2}" fill="{color}"/>'
                f'<text x="{left + length + 5:.1f}" y="{y + 11}">{value:.1f}</text>'
            )
            y += bar
        y += gap
    return "\n".join([*parts, "</svg>"]) + "\n"
