"""What a soak showed, as Markdown."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.faults.soak.memory import Memory

MOST_LINES = 12
OUTCOMES = ("served", "refused", "failed", "wrong")
ABOUT = """\
{cores} cores, Python {python}; a random two-layer Llama (vocabulary 320) with two LoRA adapters, served with
`{flags}`.

{total} requests of {kinds} kinds. Each minute brings a fault after 10 seconds; after 48 the load is paused and the
rig's invariants are checked: /health 200, nothing running or waiting, free + cached blocks = all, no new process or
descriptor, and the golden greedy request unchanged (it is part of the load, too). The server then rests for four
seconds, in which it gives freed memory back, and what is still resident is noted. `failed` is a 5xx or an error event,
which is allowed only to requests under way while an engine was dead or the server was swamped."""


@dataclass(slots=True)
class Minute:
    """What one minute showed."""

    fault: str
    seen: str = ""
    troubles: list[str] = field(default_factory=list[str])
    log: list[str] = field(default_factory=list[str])
    api: float = 0.0  # resident MB once it rested
    engine: float = 0.0


def row(number: int, minute: Minute) -> list[str]:
    """A minute as a row of the report's table."""
    result = "; ".join(minute.troubles) or "held"
    return [str(number + 1), minute.fault, minute.seen, f"{minute.api:.0f}", f"{minute.engine:.0f}", result]


def report(
    command: str,
    flags: Sequence[str],
    minutes: Sequence[Minute],
    outcomes: Counter[tuple[str, str]],
    memory: Mapping[str, Memory],
    failures: Sequence[str],
) -> str:
    """The whole report."""
    kinds = sorted({kind for kind, _ in outcomes})
    about = ABOUT.format(
        cores=os.cpu_count(),
        python=platform.python_version(),
        flags=" ".join(flags),
        total=outcomes.total(),
        kinds=len(kinds),
    )
    held = ["**It did not hold:**", "", *(f"- {failure}" for failure in failures)] if failures else ["All of it held."]
    sections = [
        [f"# Soak: {len(minutes)} minutes with a fault each, {time.strftime('%Y-%m-%d')}"],
        ["```", command, "```"],
        [about],
        held,
        ["## Memory"],
        ["From the minute in which the last of the faults that leave the engine alive was seen for the first time."],
        _table(
            ("process", "MB a minute", "median resident MB, minute by minute", "at most"),
            [(name, f"{each.slope:+.3f}", _lives(each), f"{each.most:.0f}") for name, each in memory.items()],
        ),
        ["## Minutes"],
        _table(
            ("minute", "fault", "what it saw", "API MB at rest", "engine MB at rest", "result"),
            [row(*pair) for pair in enumerate(minutes)],
        ),
        ["## Load"],
        _table(("kind", *OUTCOMES), [(kind, *(str(outcomes[kind, o]) for o in OUTCOMES)) for kind in kinds]),
        ["## Warnings and errors in the log"],
        [line for i, minute in enumerate(minutes) if minute.log for line in _log(i, minute)],
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _lives(memory: Memory) -> str:
    lives = [", ".join(f"{size:.0f}" for _, size in life) for life in memory.lives()]
    return "; another process: ".join(lives)


def _log(number: int, minute: Minute) -> list[str]:
    more = len(minute.log) - MOST_LINES
    lines = minute.log[:MOST_LINES] + ([f"and {more} lines more"] if more > 0 else [])
    return [f"- minute {number + 1}, {minute.fault}:", *(f"  - `{line}`" for line in lines)]
