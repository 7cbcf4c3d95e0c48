"""Draw ``docs/performance.svg`` and the table of ``docs/performance.md`` from the newest comparisons with peers.

python -m benchmarks.performance            # after a new benchmarks/results/DATE-peers*.md: name it in MACHINES
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE, PICTURE = ROOT / "docs/performance.md", ROOT / "docs/performance.svg"
MACHINES = {"AVX-512 (VNNI, bf16)": "2026-11-22-peers.md", "AMX": "2026-11-22-peers-amx.md"}
SCENARIOS = {
    "S1": ("One stream", "tokens/s"),
    "S2": ("32 at once", "tokens/s"),
    "S3": ("8 at once, shared prefix of 1,024", "tokens/s"),
    "S4": ("TTFT of a prompt of 3,500 tokens", "s"),
    "S5": ("JSON by a schema, 8 at once", "tokens/s"),
}
ENGINES = ("fwk bf16", "fwk int8", "fwk 4-bit", "vLLM bf16", "OpenVINO bf16", "OpenVINO Q4_1", "llama.cpp Q4_1")

WIDTH, BAR, GAP, LABEL, MARGIN, TITLE = 460, 15, 4, 112, 16, 44
OURS, PEERS, SPREAD = "#2f6fab", "#b5b9bd", "#30343a"


@dataclass(frozen=True, slots=True)
class Figure:
    """Median, least and most of the runs."""

    median: float
    least: float
    most: float


def figures(page: str, scenario: str, column: str) -> dict[str, Figure]:
    """One column of a scenario's table in a page of results, by engine. Engines without a figure are left out."""
    section = re.search(rf"^## {scenario}: .*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    if section is None:
        raise SystemExit(f"the page has no scenario {scenario}")
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section[0].splitlines()
        if line.startswith("|")
    ]
    at = header.index(column)
    return {row[0]: _figure(row[at]) for row in rows if row[at]}


def _figure(cell: str) -> Figure:
    numbers = [float(number) for number in re.findall(r"[\d.]+", cell)]
    median, least, most = numbers if len(numbers) == 3 else numbers * 3
    return Figure(median, least, most)


def measured(page: str, scenario: str) -> dict[str, Figure]:
    """What the picture shows of a scenario: tokens/s, for S4 seconds to the first token."""
    if SCENARIOS[scenario][1] != "s":
        return figures(page, scenario, "tokens/s")
    found = figures(page, scenario, "TTFT p50 ms")
    return {name: Figure(f.median / 1000, f.least / 1000, f.most / 1000) for name, f in found.items()}


def picture(pages: dict[str, str]) -> str:
    """A column of panels for each machine, as SVG."""
    panel = TITLE + len(ENGINES) * (BAR + GAP) + 8
    width, height = len(pages) * WIDTH + MARGIN, len(SCENARIOS) * panel + 56
    font = 'font-family="sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>',
        "<title>fwk alongside vLLM, OpenVINO and llama.cpp on two cores</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, (machine, page) in enumerate(pages.items()):
        left = MARGIN + i * WIDTH
        lines.append(_text(left, 24, f"Two cores with {machine}", 'font-size="15" font-weight="bold"'))
        for j, scenario in enumerate(SCENARIOS):
            lines += _panel(left, 36 + j * panel, scenario, measured(page, scenario))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(left: int, top: int, scenario: str, found: dict[str, Figure]) -> list[str]:
    title, unit = SCENARIOS[scenario]
    better = "less is better" if unit == "s" else "more is better"
    lines = [_text(left, top + 24, f"{scenario}  {title} ({unit}, {better})", 'font-weight="bold"')]
    room = WIDTH - LABEL - 80
    scale = room / max(figure.most for figure in found.values())
    for k, name in enumerate(name for name in ENGINES if name in found):
        figure, y = found[name], top + TITLE - 8 + k * (BAR + GAP)
        x, middle = left + LABEL, y + BAR / 2
        colour = OURS if name.startswith("fwk") else PEERS
        lines += [
            _text(x - 6, y + 12, name, 'text-anchor="end"'),
            f'<rect x="{x}" y="{y}" width="{figure.median * scale:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<line x1="{x + figure.least * scale:.1f}" x2="{x + figure.most * scale:.1f}" y1="{middle}" y2="{middle}" '
            f'stroke="{SPREAD}" stroke-width="1.5"/>',
            _text(round(x + figure.most * scale + 6), y + 12, _short(figure.median)),
        ]
    return lines


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="{SPREAD}"{" " if style else ""}{style}>{html.escape(words)}</text>'


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def table(pages: dict[str, str]) -> str:
    """Medians, a row for each engine, as Markdown."""
    lines: list[str] = []
    for machine, page in pages.items():
        found = {scenario: measured(page, scenario) for scenario in SCENARIOS}
        heads = " | ".join(f"{scenario} {unit}" for scenario, (_, unit) in SCENARIOS.items())
        lines += [f"Two cores with {machine} ([all figures](../benchmarks/results/{MACHINES[machine]})):", ""]
        lines += [f"| engine | {heads} |", f"| --- |{' --- |' * len(SCENARIOS)}"]
        for name in ENGINES:
            cells = (found[scenario].get(name) for scenario in SCENARIOS)
            lines.append(f"| {name} | {' | '.join('-' if f is None else _short(f.median) for f in cells)} |")
        lines.append("")
    return "\n".join(lines)


def with_table(page: str, tables: str) -> str:
    """The page with the tables between its two marks."""
    replaced, count = re.subn(
        r"(?<=<!-- figures -->\n).*(?=<!-- /figures -->)", lambda _: tables, page, count=1, flags=re.DOTALL
    )
    if not count:
        raise SystemExit(f"{PAGE} has no <!-- figures --> ... <!-- /figures -->")
    return replaced


def results() -> dict[str, str]:
    """The pages of results by machine."""
    return {machine: (RESULTS / name).read_text(encoding="utf-8") for machine, name in MACHINES.items()}


def main() -> None:
    pages = results()
    PICTURE.write_text(picture(pages), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(pages)), encoding="utf-8")


if __name__ == "__main__":
    main()
