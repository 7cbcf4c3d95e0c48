"""The guides and the files of ``deploy``: every command, option and request in them is one that exists."""

from __future__ import annotations

import ast
import configparser
import importlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import fwk
from fwk.cli.commands import commands
from fwk.plugins import PluginSet, discover
from fwk.plugins.options import called, normal

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
DEPLOY = ROOT / "deploy"
IDS = {"ids": lambda path: path.name}
ROUTES = {"/health", "/ready"}
OWN = {
    "serve": {"config"},
    "chat": {"url", "key", "system"},
    "bench": {"url"},
}
"""Flags of commands that are not options."""


@cache
def options() -> dict[str, str]:
    plugins: PluginSet = discover()
    return called(plugins)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each command: continued lines joined, quotes over several lines read."""
    for line in re.split(r"\n(?=\S)", text.replace("\\\n", " ")):
        words = shlex.split(line, comments=True)
        if words:
            yield words


def wrong_flags(words: Sequence[str]) -> list[str]:
    """Flags of ``fwk COMMAND ...`` that are no options."""
    own = OWN.get(words[0], set())
    names = [normal(word.partition("=")[0]) for word in words if word.startswith("--")]
    return [name for name in names if name not in options() and name not in own]


def check_fwk(words: Sequence[str]) -> None:
    assert words[0] in commands(), words
    if words[0] == "plugins":
        assert words[1] in commands("plugins."), words
    assert not wrong_flags(words), words


@pytest.mark.parametrize("page", GUIDES, **IDS)
def test_every_command_of_a_guide_exists(page: Path) -> None:
    for block in blocks(page, "bash"):
        for line in command_lines(block):
            words = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), line))
            if Path(words[0]).name == "fwk":
                check_fwk(words[1:])
            elif words[0] == "curl":
                for flag, value in itertools.pairwise(words):
                    if flag == "-d":
                        assert isinstance(json.loads(value), dict)
            elif words[0] in ("pip", ".venv/bin/pip"):
                assert words[1] in ("install", "download", "wheel")
            elif "/bin/" in words[0]:  # of an environment that the page has made
                assert f"-m venv {words[0].partition('/bin/')[0]}" in page.read_text(), words
            else:
                assert words[0] in (
                    "python3",
                    "podman",
                    "uv",
                    "pipx",
                    "mkdir",
                    "etcd",
                    "ray",
                    "serve",
                    "apt-get",
                ) or words[0].startswith("deploy/"), words
            for word in words:
                assert not word.startswith("deploy/") or (ROOT / word).exists(), word


@pytest.mark.parametrize("page", GUIDES, **IDS)
def test_every_option_that_prose_names_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = [span for span in re.findall(r"`([^`]+)`", text) if span.startswith("--")]
    named = [
        normal(word.rstrip(",").partition("=")[0]) for span in spans for word in span.split() if word.startswith("--")
    ]
    assert [name for name in named if name not in options()] == []


def test_what_does_not_exist_is_found() -> None:
    with pytest.raises(AssertionError):
        check_fwk(["serve", "MODEL", "--no-such-option", "3"])
    with pytest.raises(AssertionError):
        check_fwk(["server", "MODEL"])


def names_used(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fwk"
    }


@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "python")], **IDS)
def test_python_of_a_guide_uses_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        assert names_used(ast.parse(block)) <= set(fwk.__all__)


RUNNING = [page for page in GUIDES if blocks(page, "python") and page.name not in ("images.md", "sound.md")]
"""Guides whose Python needs no other model than the default one, and no files."""


@pytest.mark.model
@pytest.mark.sweep
@pytest.mark.parametrize("page", RUNNING, **IDS)
def test_python_of_a_guide_runs(page: Path, tmp_path: Path) -> None:
    import sys

    for number, block in enumerate(blocks(page, "python")):
        file = tmp_path / f"{number}.py"
        file.write_text(block)
        ran = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False, timeout=240)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip()


# deploy


def instructions(name: str) -> list[tuple[str, str]]:
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    return [
        (word, rest.strip())
        for line in text.splitlines()
        if line and not line.startswith("#")
        for word, _, rest in [line.partition(" ")]
    ]


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_containers_are_built_and_begun_as_users_are_told(name: str) -> None:
    found = instructions(name)
    known = {"FROM", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "ENV"}
    assert {word for word, _ in found} <= known
    last = max(i for i, (word, _) in enumerate(found) if word == "FROM")
    final = dict(found[last:])
    assert int(final["USER"]) > 0, "it runs as root"
    entry = json.loads(final["ENTRYPOINT"])
    assert entry[:2] == ["fwk", "serve"]
    check_fwk(entry[1:])
    assert json.loads(final["HEALTHCHECK"].partition("CMD ")[2])[0] == "python"
    assert any(route in final["HEALTHCHECK"] for route in ROUTES)
    stages = [rest.split()[-1] for word, rest in found if word == "FROM" and " AS " in rest]
    sources = re.findall(r"--from=(\w+)", (DEPLOY / name).read_text())
    assert set(sources) <= set(stages)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_hadolint_has_no_objection(name: str) -> None:
    words = ["hadolint", "--ignore", "DL3008", "--ignore", "DL3013", "--ignore", "DL3042", str(DEPLOY / name)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_the_compose_file() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["fwk"]
    check_fwk(["serve", *service["command"]])
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "not open to all by default"
    assert normal("api-key") in {name.removeprefix("FWK_").lower() for name in service["environment"]}


def test_the_kubernetes_manifests() -> None:
    kinds: dict[str, Any] = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    assert set(kinds) == {"PersistentVolumeClaim", "Deployment", "Service"}
    pod = kinds["Deployment"]["spec"]["template"]
    assert kinds["Deployment"]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    [container] = pod["spec"]["containers"]
    check_fwk(["serve", *container["args"]])
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in ROUTES
        assert container[probe]["httpGet"]["port"] in ports
    assert kinds["Service"]["spec"]["ports"][0]["targetPort"] in ports
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"]}
    assert claims == {kinds["PersistentVolumeClaim"]["metadata"]["name"]}
    timeout = container["args"][container["args"].index("--shutdown-timeout") + 1]
    assert float(timeout) < pod["spec"]["terminationGracePeriodSeconds"], "killed before it has drained"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "fwk.service")
    return parser


def test_the_systemd_unit() -> None:
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"])
    assert Path(words[0]).name == "fwk"
    check_fwk(words[1:])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_has_no_objection_to_the_unit(tmp_path: Path) -> None:
    fake = tmp_path / "fwk"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    copy = tmp_path / "fwk.service"
    copy.write_text((DEPLOY / "fwk.service").read_text().replace("/opt/fwk/bin/fwk", str(fake)))
    ran = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    told = [line for line in ran.stderr.splitlines() if "fwk.service" in line]
    assert told == [], told


def test_the_list_of_models() -> None:
    from fwk.cli.option_parsing import read_config_file
    from fwk.plugins.pools import server_configs

    found = server_configs(discover(), read_config_file(str(DEPLOY / "models.yaml")), print)
    assert [one.model.served_model_name for one in found] == [("chat",), ("embed",)]


def test_the_ray_example_uses_what_exists() -> None:
    tree = ast.parse((DEPLOY / "ray_serve.py").read_text())
    [taken] = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    assert taken.module is not None
    assert callable(getattr(importlib.import_module(taken.module), taken.names[0].name))
