"""docs/performance.md shows what the dated pages of results say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from benchmarks.performance import ENGINES, PAGE, PICTURE, Figure, figures, picture, results, table, with_table

RUN = """
## S1: one stream

| engine | n | tokens/s | TTFT p50 ms |
| --- | --- | --- | --- |
| fwk bf16 | 6 | 126.0 (118.2 to 128.6) | 79.6 (75.1 to 85.0) |
| vLLM bf16 | 1 | 43.4 | |

## S2: others

| engine | n | tokens/s |
| --- | --- | --- |
| fwk bf16 | 1 | 5 |
"""


def test_figures_are_read_by_scenario_and_column() -> None:
    assert figures(RUN, "S1", "tokens/s") == {
        "fwk bf16": Figure(126.0, 118.2, 128.6),
        "vLLM bf16": Figure(43.4, 43.4, 43.4),
    }
    assert figures(RUN, "S1", "TTFT p50 ms") == {"fwk bf16": Figure(79.6, 75.1, 85.0)}
    assert figures(RUN, "S2", "tokens/s") == {"fwk bf16": Figure(5, 5, 5)}
    with pytest.raises(SystemExit, match="no scenario S3"):
        figures(RUN, "S3", "tokens/s")


def test_the_page_and_the_picture_are_the_generated_ones() -> None:
    pages, text = results(), PAGE.read_text(encoding="utf-8")
    assert with_table(text, table(pages)) == text, "run: python -m benchmarks.performance"
    assert picture(pages) == PICTURE.read_text(encoding="utf-8"), "run: python -m benchmarks.performance"


def test_the_picture_shows_every_engine_and_loads_nothing() -> None:
    root = ElementTree.fromstring(PICTURE.read_text(encoding="utf-8"))
    words = [node.text or "" for node in root.iter() if node.tag.endswith("text")]
    assert all(words.count(name) == 10 for name in ENGINES)
    assert "href" not in PICTURE.read_text(encoding="utf-8")
