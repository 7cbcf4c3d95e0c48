"""The page at /: what is served, to whom, and that it loads nothing from other hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from fwk.config import ServerOptions
from fwk.interfaces.dialect import DialectContext
from fwk.server.admission import AdmissionController
from fwk.server.app import Reports, build_app
from fwk.server.keys import Keys
from fwk_server.openai.dialect import OpenAIDialect
from fwk_server.playground import PlaygroundOptions, dialect
from fwk_server.playground.dialect import FILES, PlaygroundDialect
from fwk_server.tgi.dialect import TGIDialect

STATIC = Path(dialect.__file__).with_name("static")


def app_with(frontend: object, *, is_on: bool = True, key: str | None = "sesame") -> FastAPI:
    """The page alongside TGI's POST / and OpenAI's routes, for holders of a key."""
    context = DialectContext(frontend)  # type: ignore[arg-type]
    own = DialectContext(frontend, PlaygroundOptions(playground=is_on))  # type: ignore[arg-type]
    return build_app(
        [OpenAIDialect(context), PlaygroundDialect(own), TGIDialect(context)],
        [],
        reports=Reports(lambda: None, lambda: None, dict),
        keys=Keys(key),
        admission=AdmissionController(ServerOptions(), 100),
        max_body_bytes=1 << 20,
    )


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_the_files_need_no_key_and_all_else_does(frontend) -> None:  # type: ignore[no-untyped-def]
    async with client_of(app_with(frontend)) as client:
        for path, (name, kind) in FILES.items():
            reply = await client.get(path)
            assert reply.status_code == 200
            assert reply.content == (STATIC / name).read_bytes()
            assert reply.headers["content-type"] == kind
            assert (await client.head(path)).status_code == 200
        for path in ("/v1/models", "/playground/other.js", "/playground/../app.js", "/server_info"):
            assert (await client.get(path)).status_code == 401
        assert (await client.post("/", json={"inputs": "x"})).status_code == 401
        assert (await client.post("/v1/chat/completions", json={})).status_code == 401


async def test_tgis_route_of_the_same_path_still_works(frontend) -> None:  # type: ignore[no-untyped-def]
    async with client_of(app_with(frontend, key=None)) as client:
        reply = await client.post("/", json={"inputs": "x"})
        assert reply.status_code == 200
        assert "generated_text" in reply.text
        assert (await client.put("/")).status_code == 405
        for data in (b"\0", b"{}"):  # an error of POST / has the shape of the dialect whose route that is
            error = (await client.post("/", content=data)).json()
            assert error["error_type"] == "validation"


async def test_it_can_be_turned_off(frontend) -> None:  # type: ignore[no-untyped-def]
    async with client_of(app_with(frontend, is_on=False, key=None)) as client:
        assert [(await client.get(path)).status_code for path in FILES] == [405, *[404] * (len(FILES) - 1)]


async def test_the_policy_lets_in_nothing_but_its_own_files(frontend) -> None:  # type: ignore[no-untyped-def]
    async with client_of(app_with(frontend)) as client:
        headers = (await client.get("/")).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_nothing_points_elsewhere_and_it_is_small() -> None:
    texts = {path.name: path.read_text() for path in STATIC.iterdir()}
    assert set(texts) == {name for name, _ in FILES.values()}
    assert sum(map(len, texts.values())) < 100_000
    for name, text in texts.items():
        assert set(re.findall(r"https?://\w[^\"\s]*", text)) <= {"http://www.w3.org/2000/svg"}, f"{name} names another"
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text), f"{name} makes HTML of text"
    links = {link for text in texts.values() for link in re.findall(r'(?:src=|href=|from )"(/[^"]*)"', text)}
    assert links | {"/"} == {*FILES, "/openapi.json"}
    for page in (text for name, text in texts.items() if name.endswith(".html")):
        assert not re.search(r"\son\w+=|style=|<script>|<style>", page), "the policy would stop it"


@pytest.mark.parametrize("name", ["index.html", "docs.html"])
@pytest.mark.parametrize("tag", ["input", "textarea", "select"])
def test_every_field_has_a_label(tag: str, name: str) -> None:
    page = (STATIC / name).read_text()
    for name in re.findall(rf'<{tag} id="(\w+)"', page):
        assert f'for="{name}"' in page or re.search(rf'<label[^>]*>[^\n]*<{tag} id="{name}"', page), name


LINEAR = r"""
class Node { append() {} }
globalThis.document = { createElement: () => new Node() };
const { render } = await import(process.argv[1]);
const texts = {
  "half backticks": "`".repeat(2e5) + "a".repeat(2e5),
  "runs": Array.from({ length: 600 }, (_, i) => "`".repeat(i + 1)).join("a"),
  "code": "`a`".repeat(1e5), "stars": "*".repeat(4e5), "emphasis": "*a".repeat(2e5), "brackets": "[".repeat(4e5),
  "links": "[a](http://x".repeat(4e4), "a heading": "# " + " ".repeat(2e5) + "\u2028x\u2028",
  "a fence": "`".repeat(2e5) + "\u2028x\u2028", "a ruler": "|a|\n" + "|-".repeat(2e5) + "x",
  "spaces": " ".repeat(4e5) + "-",
};
for (const [name, text] of Object.entries(texts)) { console.error(name); render(text); }
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_markdown_is_read_in_linear_time() -> None:
    """What a model writes is rendered at each of its words: quadratic time for 400 kB would be minutes."""
    module = (STATIC / "markdown.js").as_uri()
    command = ["node", "--input-type=module", "--eval", LINEAR, "--experimental-default-type=module", module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-500:]
