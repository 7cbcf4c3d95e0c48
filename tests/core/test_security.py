"""What the sources may not contain: loaders that run what they read, shells, open templates, guards that -O removes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.helpers.sources import FILES, ROOT, dotted

BANNED_MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing",
}  # fmt: skip
BANNED_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "torch.hub.load", "os.system", "os.popen",
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.unsafe_load_all",
    "tempfile.mktemp", "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip
BANNED_KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
"""Arguments that may not be True."""
CLIENT_INPUT = ("core/fwk/server", "core/fwk/text", "core/fwk/types", "plugins/server", "plugins/parsers")
"""Modules that read what clients send: there ``assert`` may only tell the type checker what the program knows."""
JSON_TYPES = {"str", "bytes", "int", "float", "bool", "list", "dict", "tuple"}


def findings(source: str, *, reads_clients: bool = False) -> Iterator[tuple[int, str]]:
    """What of the banned is in a source: line and name."""
    tree = ast.parse(source)
    names: dict[str, str] = {}  # what is imported under which name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else ""
                yield from _module(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from _module(node.lineno, node.module)
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _call(node, names)
        elif isinstance(node, ast.Assert) and reads_clients and not _prunes_last_layer(node.test):
            yield node.lineno, "assert"


def _module(line: int, name: str) -> Iterator[tuple[int, str]]:
    if name.partition(".")[0] in BANNED_MODULES:
        yield line, name


def _call(node: ast.Call, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    first, dot, rest = dotted(node.func).partition(".")
    name = (names.get(first) or first) + dot + rest
    if name in BANNED_CALLS:
        yield node.lineno, name
    if name.startswith("jinja2.") and name.rpartition(".")[2] in {"Environment", "NativeEnvironment", "Template"}:
        yield node.lineno, name  # those of jinja2.sandbox have Sandboxed in their names
    for keyword in node.keywords:
        if keyword.arg in BANNED_KEYWORDS and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        ):
            yield node.lineno, f"{keyword.arg}="


def _prunes_last_layer(test: ast.expr) -> bool:
    """``x is not None``, or ``isinstance`` of a class that no JSON value has."""
    if isinstance(test, ast.Compare):
        is_none = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
        return is_none and isinstance(test.ops[0], ast.IsNot)
    if isinstance(test, ast.Call) and dotted(test.func) == "isinstance":
        return not JSON_TYPES & {node.id for node in ast.walk(test.args[1]) if isinstance(node, ast.Name)}
    return False


def test_the_sources_hold_nothing_of_it() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in FILES
        for line, what in findings(
            path.read_text(), reads_clients=path.relative_to(ROOT).as_posix().startswith(CLIENT_INPUT)
        )
    ]
    assert len(FILES) > 100
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import multiprocessing.pool", "eval('1')", "exec(text)",
        "import torch\ntorch.load(path)", "from torch import load\nload(path)", "import torch as t\nt.load(path)",
        "import yaml\nyaml.load(text)", "from yaml import unsafe_load as read\nread(text)",
        "import subprocess\nsubprocess.run(line, shell=True)", "subprocess.run(line, shell=is_shell)",
        "import os\nos.system(line)", "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import jinja2\njinja2.Environment()", "from jinja2 import Template\nTemplate(text)",
        "from jinja2.nativetypes import NativeEnvironment as E\nE()",
        "from transformers import AutoModel\nAutoModel.from_pretrained(name, trust_remote_code=True)",
        "assert value > 0", "assert isinstance(value, str)", "assert isinstance(value, str | Request)",
        "assert value is None", "assert value",
    ],
)  # fmt: skip
def test_each_is_found(source: str) -> None:
    assert list(findings(source, reads_clients=True))


@pytest.mark.parametrize(
    "source",
    [
        "import yaml\nyaml.safe_load(text)", "import json\njson.load(file)", "model.eval()", "re.compile(text)",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment as E\nE()", "run(line, shell=False)",
        "assert request is not None", "assert isinstance(error, InvalidRequest)",
    ],
)  # fmt: skip
def test_what_looks_like_it_is_not(source: str) -> None:
    assert not list(findings(source, reads_clients=True))


def test_keys_are_compared_in_constant_time() -> None:
    """Nobody compares a key with ``==``, and somebody does with ``compare_digest``."""
    uses = 0
    for path in [*(ROOT / "core/fwk/server").glob("*.py"), *(ROOT / "http/fwk_http").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
                terms = [dotted(term).lower() for term in (node.left, *node.comparators)]
                assert not any(term.endswith(("_key", "api_key")) for term in terms), f"{path}:{node.lineno}"
            uses += isinstance(node, ast.Call) and dotted(node.func) == "hmac.compare_digest"
    assert uses
