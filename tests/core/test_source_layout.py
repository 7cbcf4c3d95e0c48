"""Core stays small, and names no feature: its packages' lines, and words that stand in no identifier of theirs."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core/fwk"
PAGE = (ROOT / "docs/design/source-layout.md").read_text()
MAY_GROW = 1.02

NAMELESS = ("engine", "worker", "server", "types", "config", "setup")
"""Packages of core whose identifiers name no feature."""

WORDS = (
    "lora", "adapter", "eplb", "expert", "mamba", "disaggregation", "prefill_server", "remote_prefill", "kv_offer",
    "image", "media", "multimodal", "weight_update", "update_weights", "sleep", "replica", "hidden_states",
    "prompt_logprobs", "pooling", "embed", "classify",
)  # fmt: skip

NOT_OURS = ("asyncio", "time")
"""Modules whose attributes are no names of features: ``time.sleep``."""


def rows(heading: str) -> dict[str, int]:
    """A table of the page: its first column, and the number in its second."""
    part = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return {
        name: int(count.replace(",", ""))
        for name, count in re.findall(r"^\| `([\w ]+)` \| ([\d,]+) \|", part, re.MULTILINE)
    }


def lines(package: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (CORE / package).rglob("*.py"))


def packages() -> list[str]:
    return sorted(path.name for path in CORE.iterdir() if (path / "__init__.py").is_file())


def test_every_package_has_a_row() -> None:
    assert sorted(rows("package")) == packages()


@pytest.mark.parametrize("package", packages())
def test_a_package_grows_only_on_purpose(package: str) -> None:
    """Whoever adds more changes the row of docs/design/source-layout.md, and says why."""
    assert lines(package) <= MAY_GROW * rows("package")[package]


def identifiers(path: Path) -> Iterator[str]:
    """Names that a file defines or uses, words parted by ``_``; those of modules it imports are not its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in NOT_OURS:
            continue
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str) and not (isinstance(node, ast.alias) and "." in name):
                yield re.sub(
                    r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.replace("LoRA", "Lora")
                ).lower()


def words_in(name: str) -> list[str]:
    """Those of ``WORDS`` that stand in an identifier whole, or in the plural: no ``media`` in ``intermediate``."""
    return [word for word in WORDS if re.search(rf"(?:^|_){word}s?(?:_|$)", name)]


def named() -> Counter[str]:
    """How often each of the words stands in an identifier, not counting its repetitions in one file."""
    found: Counter[str] = Counter()
    for package in NAMELESS:
        for path in (CORE / package).rglob("*.py"):
            for name in set(identifiers(path)):
                found.update(words_in(name))
    return found


def test_words_are_found_whole(tmp_path: Path) -> None:
    source = "time.sleep(1)\nLoRASpec, intermediate, ImageSize, sleep_all, loras = 1\n"
    (tmp_path / "code.py").write_text(source)
    names = identifiers(tmp_path / "code.py")
    assert sorted(word for name in names for word in words_in(name)) == ["image", "lora", "lora", "sleep"]


def test_core_names_no_feature() -> None:
    """What is left is counted on the page, and may only become less."""
    allowed = rows("word")
    assert {word: count for word, count in named().items() if count > allowed.get(word, 0)} == {}


def test_what_has_become_less_is_written_down() -> None:
    found = named()
    assert {word: count for word, count in rows("word").items() if found[word] < count} == {}
