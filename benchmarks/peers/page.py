"""The result page: a table for each scenario, the goals, starts and memory, and what could not be measured."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.peers.engines import BY_TTFT, PACKED, SCENARIOS, Engine, is_ours
from benchmarks.peers.goals import GOALS, RATE, TTFT, judge, ratios
from benchmarks.peers.rounds import Record
from fwk.errors import ConfigError

TITLES = {
    "S1": "one stream, 128 tokens in, 128 out, 8 requests",
    "S2": "32 at once, 128 in, 128 out, 64 requests",
    "S3": "8 at once, a shared prefix of 1,024 tokens and 32 own, 32 out, 32 requests",
    "S4": "one prompt of 3,500 tokens, 16 out",
    "S5": "JSON by a schema, 8 chats at once, 16 requests, at most 64 out",
    "G1": "Gemma 3 270M, one stream, 128 in, 128 out, 4 requests",
    "B1": "Llama 3.2 1B's shape, random weights, one stream, 64 in, 48 out, 3 requests",
    "B16": "the same, 16 at once",
    "BP": "the same, one prompt of 2,000 tokens, 8 out",
    "T1": "Llama 3.2 3B's shape, one stream, 64 in, 32 out, 2 requests",
    "M1": "Qwen3-MoE's (1,024 hidden, 16 layers, 4 of 32 experts of 768), one stream, 64 in, 96 out, 3 requests",
    "M16": "the same, 16 at once",
    **{
        name: f"{shape} in {mix}, random weights, {count} at once, 64 in, 48 out"
        for name, (shape, mix, count) in PACKED.items()
    },
}


def page(date: str, command: str, engines: Sequence[Engine], records: Sequence[Record], left_out: Sequence[str]) -> str:
    """Markdown. ``left_out``: a sentence for each thing that was to be measured and was not.

    Raises ``ConfigError`` when there is no record.
    """
    if not records:
        raise ConfigError(f"nothing was measured; {' '.join(left_out) or 'no engine ran'}")
    rounds = max((record.round for record in records), default=0)
    probes, busy = ([getattr(record, name) for record in records] for name in ("probe", "busy"))
    lines = [
        f"# {date}, fwk alongside other engines on a CPU",
        "",
        f"```\n{command}\n```",
        "",
        f"Machine: {machine()}.",
        "",
        f"One engine runs at a time; {rounds} rounds of all scenarios, in each scenario all engines in turn; a run "
        "that took long was not repeated (column n). The client shares the cores with the server; engines in process "
        "are driven without HTTP and streaming, which favours them. In S and G all have the same weights: the Q4_1 "
        "file, or what its numbers are in bfloat16. A cell is the median of the runs (least to most); a ratio is ours "
        "to theirs, the median of the rounds in which both ran, above 1 where fwk is faster: in tokens/s, in S4 and "
        "BP in time to the first token. Memory is of all processes after a run, shared pages counted once.",
        "",
        f"Before a run one thread read {spread(probes)} GB/s, and others used {spread(busy, 0)} % of the processors.",
        "",
        "| engine | weights | how | version |",
        "| --- | --- | --- | --- |",
        *(
            f"| {engine.name} | {engine.weights} | {engine.how} | {version} |"
            for engine in engines
            for version in sorted({record.version for record in records if record.engine == engine.name})
        ),
    ]
    for scenario in SCENARIOS:
        lines += _scenario(scenario, engines, [r for r in records if r.scenario == scenario])
    lines += _goals(records) + _starts(engines, records)
    if left_out:
        lines += ["", "## Not measured", "", *left_out]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """What a reader must know of it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    facts = {key.strip(): found.strip() for key, found in facts.items()}
    flags = [
        name
        for name, flag in (
            ("AVX-512", "avx512f"),
            ("VNNI", "avx512_vnni"),
            ("bf16", "avx512_bf16"),
            ("AMX", "amx_tile"),
        )
        if flag in facts.get("flags", "").split()
    ]
    memory = psutil.virtual_memory().total / 2**30
    kind = f"{facts.get('model name', platform.machine())} family {facts.get('cpu family')} model {facts.get('model')}"
    cores = f"{psutil.cpu_count()} cores of {kind} ({', '.join(flags)})"
    return f"{cores}, {memory:.0f} GiB; Python {platform.python_version()}"


def _scenario(scenario: str, engines: Sequence[Engine], records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    present = [engine for engine in engines if any(record.engine == engine.name for record in records)]
    ours = [engine.name for engine in present if is_ours(engine.name)]
    heads = [
        "engine",
        "n",
        "tokens/s",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "TPOT p50 ms",
        "memory MiB",
        *(f"{name} to it" for name in ours),
    ]
    if scenario == "S5":
        heads.insert(2, "valid")
    measure = TTFT if scenario in BY_TTFT else RATE
    lines = ["", f"## {scenario}: {TITLES[scenario]}", "", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for engine in present:
        runs = [record for record in records if record.engine == engine.name]
        own = [record.summary for record in runs]
        failed = sum(summary.num_failed for summary in own)
        cells = [engine.name, str(len(own)) + (f", {failed} requests failed" if failed else "")]
        if scenario == "S5":
            cells.append(f"{sum(s.num_valid or 0 for s in own)} of {sum(s.num_requests for s in own)}")
        cells.append(spread([summary.output_rate for summary in own]))
        cells += [spread([summary.ttft[p] for summary in own]) for p in ("p50", "p99")]
        cells.append(spread([summary.tpot["p50"] for summary in own if summary.tpot]))
        cells.append(spread([record.memory / 2**20 for record in runs if record.memory], 0))
        for name in ours:
            found = [] if is_ours(engine.name) else ratios(records, scenario, name, engine.name, measure)
            cells.append(spread(found, 2))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spread(values: Sequence[float], digits: int = 1) -> str:
    """``12.3 (11.9 to 12.8)``: the median, and the range of more than one."""
    if not values:
        return ""
    median = f"{statistics.median(values):.{digits}f}"
    return median if len(values) == 1 else f"{median} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _goals(records: Sequence[Record]) -> list[str]:
    lines = [
        "",
        "## Against what we set out for",
        "",
        "| scenario | ours | measure | against | goal | measured: times as fast | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    present = {record.scenario for record in records}
    usual = present.difference(PACKED)  # of a run of packed models alone, the goals of others are not told
    for goal in (goal for goal in GOALS if goal.scenario in present or (usual and goal.scenario not in PACKED)):
        verdict = judge(goal, records)
        head = f"| {goal.scenario} | {goal.ours} | {goal.measure} |"
        if verdict is None:
            against = ", ".join(goal.peers) or "best of all"
            lines.append(f"{head} {against} | {goal.wanted} | | not measured |")
            continue
        peer, found = verdict
        met = "met" if statistics.median(found) >= goal.factor else f"missed: {goal.factor:.2f} wanted"
        against = peer if len(goal.peers) == 1 else f"{peer}, the best"
        lines.append(f"{head} {against} | {goal.wanted} | {spread(found, 2)} | {met} |")
    return lines


def _starts(engines: Sequence[Engine], records: Sequence[Record]) -> list[str]:
    lines = [
        "",
        "## Start and memory",
        "",
        "From the command to the first healthy answer (in process: to the loaded model); the most memory all processes "
        "had together (resident; shared pages counted in each), over all scenarios.",
        "",
        "| engine | starts | s to healthy | most memory, MiB |",
        "| --- | --- | --- | --- |",
    ]
    for engine in engines:
        own = [record for record in records if record.engine == engine.name and record.cold_start is not None]
        if own:
            starts = sorted({record.cold_start for record in own if record.cold_start is not None})
            memory = max(record.peak_rss for record in own) / 2**20
            lines.append(f"| {engine.name} | {len(starts)} | {spread(starts, 2)} | {memory:.0f} |")
    return lines
