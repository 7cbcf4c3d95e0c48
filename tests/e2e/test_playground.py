"""The page at / in a browser. Needs Chromium and chromedriver (Debian: chromium, chromium-driver)."""

from __future__ import annotations

import json
import os
import re
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
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


RICH = "data: " + json.dumps(
    {
        "choices": [
            {
                "delta": {
                    "content": "# T\n\n- a\n  1. [b](https://x.y/)\n\n> q\n\n|a|b|\n|-|-|\n|1|2|\n\n```python\n"
                    "@f\ndef f(x: int = 1):  # c\n    return 'a' + str(None)\n```\n\n$$x^2$$\n"
                },
                "finish_reason": "stop",
            }
        ]
    }
)
RICH += "\n\ndata: [DONE]\n\n"


@pytest.fixture
def page(tiny: Server) -> Iterator[Browser]:
    with browser() as found:
        found.open(tiny.url)
        found.wait("document.getElementById('model').value === 'tiny'")
        found.click("#show-settings")
        found.type("#max_tokens", "20")
        found.type("#temperature", "0")
        yield found
        assert [one for one in found.log() if not re.search("status of 40[04]", one)] == [], (
            "the browser reported errors"
        )


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
    page.click("#menu")
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
    assert page.violations(AXE) == [], "the start page"
    page.run(f"window.own = window.fetch; window.fetch = async () => new Response({json.dumps(RICH)})")
    page.type("#input", "Hello." + ENTER)
    answered(page, 1)
    page.wait("document.querySelector('.hljs-keyword') && document.querySelector('math')")
    page.run("window.fetch = window.own")
    assert page.violations(AXE) == [], "settings"
    page.click("#show-chats")
    assert page.violations(AXE) == [], "chats"
    page.click("#show-server")
    page.wait("document.querySelectorAll('.chart').length === 6")
    assert page.violations(AXE) == [], "server"
    page.click("#theme")
    assert page.violations(AXE) == [], "the other colours"
    page.open(f"{tiny.url}/docs")
    page.wait("document.querySelectorAll('.route').length > 20")
    page.click(".route summary", "/v1/completions")
    assert page.violations(AXE) == [], "docs"


RENDERED = """
    return import('/playground/markdown.js').then(({ render, Growing }) => {
        const [whole, grown] = ['div', 'div'].map((name) => document.createElement(name));
        const growing = new Growing(grown);
        whole.append(...render(arguments[0]));
        for (let end = 0; end < arguments[0].length; end += 3) growing.draw(arguments[0].slice(0, end));
        growing.draw(arguments[0]);
        return [whole.innerHTML, grown.innerHTML, growing.done];
    })
"""
HOSTILE = r"""# T <i>
<img src=x onerror=alert(1)><script>alert(1)</script><!-- - **b** -->
[l](https://x.y/) [a.b](https://a.b@x.y/) [j](javascript:alert(1)) [d](data:text/html,x) [r](/sleep) ![p](https://x.y/p)

- *a*
  - `<b>`

> q

|a|b|
|-|-:|
|1|<u>|

```js"><b onload=alert(1)>
<p>HIDDEN
```

\[\href{javascript:alert(1)}{x}\]

$x < 1$, for $5 or $6
""".replace("HIDDEN", "\u202e\U000e0041\U000e0042")


def test_texts_are_never_read_as_html(page: Browser) -> None:
    page.type("#input", "<img src=x onerror=alert(1)> <b>x</b>" + ENTER)
    answered(page, 1)
    assert page.text(".message.user .body").startswith("<img")
    whole, grown, done = page.run(RENDERED, HOSTILE)
    assert grown == whole, "drawn bit by bit it is the same"
    assert 0 < done < len(HOSTILE), "and what cannot change any more was not drawn again"
    assert set(re.findall(r"<(\w+)", whole)) <= {
        *(
            "h3",
            "p",
            "br",
            "a",
            "span",
            "ul",
            "li",
            "em",
            "strong",
            "code",
            "blockquote",
            "div",
            "table",
            "thead",
            "tbody",
            "tr",
        ),
        *("th", "td", "pre", "button", "math", "mrow", "mi", "mo", "mn"),
    }
    names = set(re.findall(r' ([a-z-]+)="', whole))
    assert names <= {*("href", "title", "rel", "target", "class", "style", "tabindex", "type", "stretchy", "display")}
    assert set(re.findall(r'href="([^"]*)"', whole)) == {"https://x.y/", "https://a.b@x.y/", "https://x.y/p"}
    assert whole.count('<span class="host"> (x.y)</span></a>') == 3, "where a link leads is shown"
    for text in (
        "[U+202E]",
        "[2 hidden characters]",
        "&lt;script&gt;",
        "&lt;!--",
        "<code>&lt;b&gt;</code>",
        "$5 or $6",
    ):
        assert text in whole, text


def test_chats_and_settings_outlive_a_reload(page: Browser, tiny: Server) -> None:
    def reload() -> None:
        page.open(tiny.url)
        page.wait("document.getElementById('model').value === 'tiny'")
        page.wait("document.getElementById('chat-list').children.length > 0")

    page.type("#system", "Be brief.")
    page.type("#input", "A first chat." + ENTER)
    answered(page, 1)
    page.click(".message.assistant button", "Try again")
    answered(page, 1)
    page.click(".message.assistant button", "\u2039")
    said = page.text(".message.assistant .body")
    page.click("#new")
    page.type("#input", "Another chat." + ENTER)
    answered(page, 1)
    reload()
    assert page.run("return document.getElementById('system').value") == "Be brief."
    assert page.run("return document.getElementById('max_tokens').value") == "20"
    if page.run("return document.getElementById('chats').hidden"):
        page.click("#show-chats")
    page.type("#search", "FIRST chat")
    page.wait("document.querySelectorAll('#chat-list li').length === 1")
    page.click("#chat-list .title")
    assert page.text(".message.assistant .body") == said
    assert "1 of 2" in page.text(".message.assistant .foot"), "the branch that was shown"
    exported = page.run(
        "let found; const make = URL.createObjectURL;"
        " URL.createObjectURL = (blob) => { found = blob; return make(blob); };"
        " document.getElementById('export-all').click(); URL.createObjectURL = make; return found.text()"
    )
    chats = json.loads(exported)["chats"]
    assert [len(chat["nodes"]) for chat in chats] == [2, 3]
    page.click("#chat-list button", "Delete")
    page.click("#chat-list button", "Really?")
    page.wait("document.querySelectorAll('.message').length === 0")
    reload()
    assert page.run("return document.querySelectorAll('#chat-list li').length") == 1


def test_a_start_page_and_a_phone(page: Browser) -> None:
    """Three things to try; on a phone one line above the chat, with a menu."""
    page.click("#show-settings")
    page.size(400, 800)
    assert page.run("return document.querySelector('header').getBoundingClientRect().height") < 60
    page.click("#menu")
    page.click("#show-server")
    assert not page.run("return document.getElementById('server').hidden")
    page.click("#menu")
    page.click("#show-server")
    assert page.run("return document.querySelectorAll('.start button').length") == 3
    page.click(".start button", "table")
    answered(page, 1)
    assert "table" in page.text(".message.user .body")


def test_images_where_the_model_sees(page: Browser) -> None:
    """By the button's file, pasted and dropped; each is in the request as a data URL, and can be removed."""
    give = """
        const data = new DataTransfer(), bytes = Uint8Array.from(atob(arguments[0]), (one) => one.charCodeAt(0));
        data.items.add(new File([bytes], "a.png", { type: arguments[2] }));
        const settings = { clipboardData: data, dataTransfer: data, cancelable: true, bubbles: true };
        const event = new (arguments[1] === "paste" ? ClipboardEvent : DragEvent)(arguments[1], settings);
        document.getElementById("input").dispatchEvent(event);
        return event.defaultPrevented;
    """
    assert page.run(give, PIXEL, "drop", "image/png"), "or the browser would open the file"
    assert page.text("#state") == "This model sees no images."
    page.run(
        "window.sent = []; const own = window.fetch; window.fetch = async (url, settings) => {"
        " if (url === '/v1/models') return Response.json({ data: [{ id: 'eyes', capabilities: ['vision'] }] });"
        " if (settings?.body) window.sent.push(JSON.parse(settings.body)); return own(url, settings); };"
        " document.getElementById('key').dispatchEvent(new Event('change'))"
    )
    page.wait("document.getElementById('model').value === 'eyes' && !document.getElementById('image').hidden")
    page.run(give, PIXEL, "paste", "image/png")
    page.wait("document.querySelectorAll('.thumb').length === 1")
    page.run(give, PIXEL, "drop", "image/png")
    page.wait("document.querySelectorAll('.thumb').length === 2")
    page.click(".thumb button")
    page.run(give, PIXEL, "drop", "image/svg+xml")
    page.wait("document.getElementById('state').textContent.includes('no PNG')")
    page.type("#input", "What is it?" + ENTER)
    page.wait("window.sent.length === 1")
    parts = page.run("return window.sent[0].messages[0].content")
    assert [part["type"] for part in parts] == ["text", "image_url"]
    assert parts[1]["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"
    answered(page, 1)
    assert page.run("return document.querySelector('.message.user img').naturalWidth") == 1
