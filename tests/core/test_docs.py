"""Documentation: links lead somewhere, pages keep their size, and every page of an index is in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
from docs.site_requests import main as site_requests
from docs.site_requests import requests_of

from fwk.cli.commands import commands, overview
from fwk.interfaces.command import GROUP, Command

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    }
)
MAX_CELL = 120
MAX_PICTURE = 150_000
"""Bytes."""
MAX_ARCHITECTURE = 120


def prose(page: Path) -> str:
    """The page without its code, in which brackets are no links and # begins no heading."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: code[0] if "](" not in code[0] else "", text)


@cache
def anchors(page: Path) -> set[str]:
    """What ``#...`` may name: headings in lower case, spaces as hyphens, other punctuation left out."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of the page that name no file, or no heading of it."""
    broken: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def test_relative_links_resolve() -> None:
    assert {page: broken for page in PAGES if (broken := broken_links(page))} == {}


def test_pictures_are_small() -> None:
    assert [picture for picture in (ROOT / "docs").rglob("*.png") if picture.stat().st_size >= MAX_PICTURE] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n\n[a](page.md#one-two) [b](no.md) [c](#three) `[d](code.md)` [e](https://a.example)\n")
    assert broken_links(page) == ["no.md", "#three"]


def test_questions_people_ask_are_answered_in_two_clicks() -> None:
    """Each links to a heading, and what stands below that holds the words of an answer."""
    [asked] = re.findall(r"^## Questions people ask\n(.*?)^## ", (ROOT / "docs/README.md").read_text(), re.S | re.M)
    found = dict(re.findall(r"\[([^\]]+)\]\(([^)]+)\)", asked))
    assert set(ANSWERS) <= set(found)
    for question, words in ANSWERS.items():
        path, _, anchor = found[question].partition("#")
        page = ROOT / "docs" / path
        parts = re.split(r"^#+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        [below] = [part for part in parts if part.splitlines()[0].lower().replace(" ", "-") == anchor]
        assert [word for word in words if word not in below] == [], question


ANSWERS = {
    "Which attention backend runs?": ("fwk plugins why attention", "/server_info"),
    "How do I add a LoRA adapter?": ("--enable-lora", "--lora-paths"),
    "How do I make it faster?": ("compiler", "--quantization", "--speculative-algorithm"),
    "How do I limit users?": ("--api-key-file", "--concurrency-limit", "--schedule-policy fair"),
    "What does a line of the log mean?": ("running", "waiting", "KV cache", "prefix cache hits", "first token"),
}
"""The questions, and what an answer must name."""


@pytest.mark.parametrize("name", ["docs/README.md", "docs/features.md"])
def test_table_cells_are_short(name: str) -> None:
    rows = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert rows
    long = [cell for row in rows for cell in row.strip("|").split("|") if len(cell.strip()) > MAX_CELL]
    assert not long


def test_the_readme_is_one_screen_with_the_test_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    assert all(len(cell.strip()) <= MAX_CELL for line in text.splitlines() if "|" in line for cell in line.split("|"))
    assert re.search(r"<!-- test-command -->\n```bash\n.+\n```\n<!-- /test-command -->", text)


def test_the_map_fits_a_few_screens() -> None:
    assert len((ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()) <= MAX_ARCHITECTURE


def test_the_index_of_decisions_is_complete() -> None:
    folder = ROOT / "docs/design"
    listed = re.findall(r"\]\((\w[\w-]*\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page.name for page in folder.glob("*.md") if page.name != "README.md")


def test_a_decision_has_its_parts() -> None:
    for page in (ROOT / "docs/design").glob("[a-z]*.md"):
        headings = re.findall(r"^## (.+)$", prose(page), re.MULTILINE)
        assert headings[:3] == ["Context", "Decision", "Consequences"], page
        assert headings[3:] in ([], ["Measurement"]), page


def test_the_reference_has_every_interface() -> None:
    listed = set(re.findall(r"^::: (fwk\.interfaces\.\w+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE))
    modules = {path.stem for path in (ROOT / "core/fwk/interfaces").glob("[a-z]*.py")} - {"cache"}  # a former name
    assert listed == {f"fwk.interfaces.{module}" for module in modules}


def test_the_commands_page_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its declarations run, under the entry points it shows."""
    text = (ROOT / "docs/plugins/commands.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"<!-- run -->\n```python\n(.*?)```", text, re.DOTALL)
    module = ModuleType("acme_evaluate.commands")
    exec(compile(source, "commands.md", "exec"), vars(module))  # noqa: S102 - our own page
    declared = {name: value for name, value in vars(module).items() if isinstance(value, Command)}
    points = re.findall(r'^"([\w.]+)" = "acme_evaluate\.commands:(\w+)"', text, re.MULTILINE)
    assert {attribute for _, attribute in points} == set(declared)
    monkeypatch.setattr(EntryPoint, "load", lambda point: declared[point.attr])
    found = [EntryPoint(name, f"acme_evaluate.commands:{attribute}", GROUP) for name, attribute in points]
    assert commands(points=found)["evaluate"] is declared["evaluate"]
    assert commands("plugins.", found)["diff"] is declared["plugins_diff"]
    assert "evaluate  score a running server" in overview("fwk", "", commands(points=found), "")


def test_what_a_page_fetches_from_others_is_found() -> None:
    assert (
        requests_of('<a href="https://a.example">a</a><img src="b.svg"><link rel="canonical" href="https://c.example">')
        == []
    )
    page = '<script src="https://a.example/a.js"></script><link rel="stylesheet" href="//b.example/b.css">'
    assert requests_of(page) == ["https://a.example/a.js", "//b.example/b.css"]


@pytest.mark.sweep
def test_the_site_builds_without_warnings_and_asks_no_other_host(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra [docs]")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    assert site_requests(tmp_path / "site") == 0
