"""The sources of core and plugins, for tests that read them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "core", "deprecated", "errors", "files", "http", "jinja", "layers", "native", "offline", "peers", "plugins",
    "process", "stops", "tokenizer",
)  # fmt: skip
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def dotted(node: ast.expr) -> str:
    """``torch.load`` of the expression that says so, else nothing."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""
