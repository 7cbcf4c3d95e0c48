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
from fwk.server.app import Reports, build_app
from fwk_http.admission import AdmissionController
from fwk_http.keys import Keys
from fwk_server.openai.dialect import OpenAIDialect
from fwk_server.playground import PlaygroundOptions
from fwk_server.playground.dialect import FILES, KINDS, STATIC, PlaygroundDialect
from fwk_server.tgi.dialect import TGIDialect

OWN = [path for path in STATIC.iterdir() if path.is_file()]


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
        for path, name in FILES.items():
            reply = await client.get(path)
            assert reply.status_code == 200
            assert reply.content == (STATIC / name).read_bytes()
            assert reply.headers["content-type"] == f"text/{KINDS[Path(name).suffix]}; charset=utf-8"
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
    every = [path for path in STATIC.rglob("*") if path.is_file()]
    assert {path.relative_to(STATIC).as_posix() for path in every} == set(FILES.values())
    loaded = [path for path in every if path.stem != "docs" and not path.name.endswith("LICENSE.txt")]
    assert sum(path.stat().st_size for path in loaded) < 400_000, "the page at /"
    texts = {path.name: path.read_text() for path in OWN}
    assert sum(map(len, texts.values())) < 100_000
    for name, text in texts.items():
        assert set(re.findall(r"https?://\w[^\"\s]*", text)) <= {"http://www.w3.org/2000/svg"}, f"{name} names another"
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text), f"{name} makes HTML of text"
    links = {link for text in texts.values() for link in re.findall(r'(?:src=|href=)"(/[^"]*)"', text)}
    links |= {f"/playground/{link}" for text in texts.values() for link in re.findall(r'from "\./([^"]*)"', text)}
    licences = {path for path in FILES if path.endswith("LICENSE.txt")}
    assert links | {"/"} | licences == {*FILES, "/openapi.json"}
    assert len(licences) == 3, "each library has its licence with it"
    for page in (text for name, text in texts.items() if name.endswith(".html")):
        assert not re.search(r"\son\w+=|style=|<script>|<style>", page), "the policy would stop it"


@pytest.mark.parametrize("name", ["index.html", "docs.html"])
@pytest.mark.parametrize("tag", ["input", "textarea", "select"])
def test_every_field_has_a_label(tag: str, name: str) -> None:
    page = (STATIC / name).read_text()
    for name in re.findall(rf'<{tag} id="(\w+)"', page):
        assert f'for="{name}"' in page or re.search(rf'<label[^>]*>[^\n]*<{tag} id="{name}"', page), name


LINEAR = r"""
import fs from "fs";
const nothing = () => {};
class Node {
  style = {}; dataset = {}; children = []; childNodes = []; className = ""; textContent = "";
  classList = { add: nothing, contains: () => false };
  append() {} remove() {} replaceChildren() {} setAttribute() {}
  appendChild(node) { return node; } cloneNode() { return this; } querySelectorAll() { return []; }
}
const make = () => new Node();
const names = ["createElement", "createElementNS", "createTextNode", "createDocumentFragment"];
globalThis.document = Object.fromEntries(names.map((name) => [name, make]));
const folder = process.argv[1], load = (name) => (0, eval)(fs.readFileSync(`${folder}/${name}`, "utf8"));
load("vendor/markdown-it.min.js");
load("vendor/temml.min.js");
const { render, Growing } = await import(`${folder}/markdown.js`);
const many = (text, count) => text.repeat(count);
const code = (name, line) => "```" + name + "\n" + many(line + "\n", 40) + "```";
const texts = {
  "half backticks": many("`", 1e5) + many("a", 1e5),
  "runs": Array.from({ length: 600 }, (_, i) => many("`", i + 1)).join("a"), "code": many("`a`", 6e4),
  "stars": many("*", 2e5), "emphasis": many("*a", 1e5), "unlike emphasis": many("*a **b ", 3e4),
  "brackets": many("[", 2e5), "links": many("[a](http://x", 2e4), "images": many("![", 1e5),
  "names": many("[a\n", 3e4), "a heading": "# " + many(" ", 2e5) + "\u2028x\u2028",
  "a fence": many("`", 1e5) + "\u2028x", "spaces": many(" ", 2e5) + "-", "a ruler": "|a|\n" + many("|-", 1e5) + "x",
  "quotes": many(">", 1e5), "lists": many("- ", 1e5), "words": many("word ", 4e4), "prices": many("$a ", 6e4),
  "open formulas": many("\\( ", 6e4), "far closers": many("- \\[\n", 3e4) + "\\]", "marks": many("$$\n", 6e4),
  "formulas": Array.from({ length: 1e4 }, (_, i) => `$x^{${i}}$`).join(" "), "braces": `$$${many("{", 3900)}$$`,
  "macros": "$$\\def\\a{\\b\\b\\b}\\def\\b{\\c\\c\\c}\\def\\c{\\a\\a\\a}\\a$$", "hidden": many("\u{e0041}", 5e4),
  "tags": many("<!--", 5e4), "lines of 1,600": code("cpp", many("_", 1600)), "keys": code("yaml", many("a ", 150)),
  "names of cpp": code("cpp", many("a1", 150)),
};
for (const [name, text] of Object.entries(texts)) {
  console.error(name);
  render(text);
  new Growing(new Node()).draw(text);
}
"""


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_markdown_is_read_in_linear_time() -> None:
    """What a model writes is rendered at each of its words: quadratic time for 200 kB would be minutes."""
    command = ["node", "--experimental-default-type=module", "--input-type=module", "--eval", LINEAR, str(STATIC)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-500:]
