"""The page at / in a browser. Needs Chromium and chromedriver (Debian: chromium, chromium-driver)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.browser import Browser, browser, missing
from tests.helpers.rig import Server

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]
AXE = Path(os.environ.get("AXE_CORE", Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js"))
IDLE = "document.getElementById('stop').hidden"
NUM_ANSWERS = "document.querySelectorAll('.message.assistant').length"
SLOW_STREAM = r"""
    window.fetch = async (url, { signal }) => new Response(new ReadableStream({
        start(stream) {
            const event = new TextEncoder().encode('data: {"choices":[{"delta":{"content":"word "}}]}\n\n');
            const timer = setInterval(() => stream.enqueue(event), 20);
            signal.addEventListener("abort", () => { clearInterval(timer); stream.error(signal.reason); });
        },
    }));
"""
ENTER = "\ue007"


@pytest.fixture
def page(tiny: Server) -> Iterator[Browser]:
    with browser() as found:
        found.open(tiny.url)
        found.wait("document.getElementById('model').value === 'tiny'")
        found.click("#show-settings")
        found.type("#max_tokens", "20")
        found.type("#temperature", "0")
        yield found
        assert [one for one in found.log() if "status of 400" not in one] == [], "the browser reported errors"


def answered(page: Browser, count: int) -> None:
    page.wait(f"{IDLE} && {NUM_ANSWERS} === {count}")


def test_a_chat(page: Browser, tiny: Server, tmp_path: Path) -> None:
    """Sending, the figures, trying again, going back, editing, and beginning anew."""
    page.type("#input", "Hello." + ENTER)
    answered(page, 1)
    assert "first token" in page.text(".foot")
    assert "20 out" in page.text(".foot")
    assert "ended: length" in page.text(".foot")
    page.click(".message.assistant button", "Try again")
    answered(page, 1)
    assert "2 of 2" in page.text(".foot")
    page.click(".message.assistant button", "\u2039")
    assert "1 of 2" in page.text(".foot")
    page.click(".message.user button", "Edit")
    page.type(".message.user textarea", "Something else.")
    page.click(".message.user button", "Send edited")
    answered(page, 1)
    assert page.text(".message.user .body") == "Something else."
    assert "2 of 2" in page.text(".message.user .foot")
    for width, height in ((1200, 800), (400, 800)):
        page.size(width, height)
        page.screenshot(tmp_path / f"{width}.png")
        assert page.run("return document.documentElement.scrollWidth <= innerWidth"), f"it is wider than {width}"
    page.click("#new")
    assert page.run(f"return {NUM_ANSWERS}") == 0
    tiny.check_invariants()


def test_stopping(page: Browser) -> None:
    page.run(SLOW_STREAM)
    page.type("#input", "Hello." + ENTER)
    page.wait("document.querySelector('.message.assistant .body')?.textContent.length > 20")
    page.click("#stop")
    answered(page, 1)
    assert "ended: stopped" in page.text(".foot")
    assert page.text(".message.assistant .body").startswith("word word")


def test_how_likely_tokens_were(page: Browser) -> None:
    page.click("#logprobs")
    page.type("#input", "Hello." + ENTER)
    answered(page, 1)
    assert page.run("return document.querySelectorAll('.token').length") == 20
    page.run("document.querySelectorAll('.token')[3].focus()")
    assert page.text(".alternatives").count("%") >= 2


def test_a_schema_and_its_faults(page: Browser) -> None:
    page.type("#schema", '{"type": "object"')
    page.type("#input", "Hello." + ENTER)
    answered(page, 1)
    assert "The JSON schema cannot be read" in page.text(".message.assistant .error")
    page.type("#max_tokens", "300")
    page.type("#schema", '{"type": "object", "properties": {"a": {"enum": [17]}}, "required": ["a"]}')
    page.click(".message.assistant button", "Try again")
    answered(page, 1)
    assert "".join(page.text(".message.assistant .body").split()) == '{"a":17}'


def test_what_the_server_says_is_shown(page: Browser) -> None:
    page.run("document.getElementById('top_p').value = 9")
    page.type("#input", "Hello." + ENTER)
    answered(page, 1)
    assert "400: top_p" in page.text(".message.assistant .error")
    page.run("document.getElementById('top_p').value = ''")
    page.click("#show-server")
    page.wait("document.querySelectorAll('.why li').length > 5")
    assert "attention" in page.text("#facts")
    assert page.run("return document.getElementById('settings').hidden")


def test_charts_follow_the_metrics(page: Browser) -> None:
    page.click("#show-server")
    page.wait("document.querySelectorAll('.chart').length === 6")
    page.type("#input", "Hello." + ENTER)
    answered(page, 1)
    was_busy = "(one) => /Tokens out.*at most (?!0 )/.test(one.textContent)"
    page.wait(f"[...document.querySelectorAll('.chart title')].some({was_busy})")
    page.run("document.querySelector('.why .chip.off summary').click()")
    assert len(page.run("return document.querySelector('.why .chip.off[open]').textContent")) > 20, "why it was refused"


def test_the_page_of_the_api(page: Browser, tiny: Server) -> None:
    page.open(f"{tiny.url}/docs")
    page.wait("document.querySelectorAll('.route').length > 20")
    page.type("#filter", "post /v1/completions")
    assert page.run("return document.querySelectorAll('.route:not([hidden])').length") == 1
    page.click(".route summary", "/v1/completions")
    page.wait("document.querySelector('.route[open] .fields')")
    assert "prompt" in page.text(".route[open] .fields")
    page.type(".route[open] textarea", '{"prompt": "x", "max_tokens": 3}')
    page.click(".route[open] .trial button")
    page.wait("document.querySelector('.route[open] pre').textContent.startsWith('200')")


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: npm install axe-core")
def test_axe_finds_no_violation(page: Browser, tiny: Server) -> None:
    page.type("#input", "Hello." + ENTER)
    answered(page, 1)
    assert page.violations(AXE) == [], "settings"
    page.click("#show-server")
    page.wait("document.querySelectorAll('.chart').length === 6")
    assert page.violations(AXE) == [], "server"
    page.click("#theme")
    assert page.violations(AXE) == [], "the other colours"
    page.open(f"{tiny.url}/docs")
    page.wait("document.querySelectorAll('.route').length > 20")
    page.click(".route summary", "/v1/completions")
    assert page.violations(AXE) == [], "docs"


def test_texts_are_never_read_as_html(page: Browser) -> None:
    page.type("#input", "<img src=x onerror=alert(1)> <b>x</b>" + ENTER)
    answered(page, 1)
    assert page.text(".message.user .body").startswith("<img")
    markdown = "# T <i>\n- **b** [l](https://x.y/)\n- `<b>` [j](javascript:alert(1))\n\n"
    markdown += "|a|b|\n|-|-|\n|1|<u>|\n```\n<p>\n```"
    found = page.run(
        "return import('/playground/markdown.js').then(({ render }) => {"
        " const box = document.createElement('div'); box.append(...render(arguments[0])); return box.innerHTML; })",
        markdown,
    )
    assert found == (
        "<h3>T &lt;i&gt;</h3><ul><li><strong>b</strong> "
        '<a href="https://x.y/" rel="noreferrer noopener" target="_blank">l</a></li>'
        "<li><code>&lt;b&gt;</code> [j](javascript:alert(1))</li></ul>"
        "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>&lt;u&gt;</td></tr></table>"
        '<pre tabindex="0"><code>&lt;p&gt;</code></pre>'
    )
