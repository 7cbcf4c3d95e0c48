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
    shown = page.run(
        "return [...document.querySelectorAll('.route:not([hidden]) summary')].map((one) => one.textContent)"
    )
    assert len(shown) == 2, "and .../render"
    assert all("/v1/completions" in one for one in shown)
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
    page.size(1400, 800)
    if page.run("return document.getElementById('chats').hidden"):
        page.click("#show-chats")
    page.size(400, 800)
    page.wait("document.getElementById('chats').hidden")
    page.click("#menu")
    page.click("#show-chats")
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    assert page.run(top, "#chats") < page.run(top, "main"), "the list is above the chat, as the other panels are"
    page.click("#menu")
    page.click("#show-chats")
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


TOOL_SERVERS = """
    const add = { name: "add", description: "Adds two numbers.", annotations: null };
    const look = { name: "look", description: "Looks.", annotations: { readOnlyHint: true } };
    const call = { server_label: "sums", name: "add", arguments: '{"a": 40, "b": 2}' };
    const usage = { input_tokens: 5, output_tokens: 3, input_tokens_details: { cached_tokens: 0 } };
    const item = (one) => ({ type: "response.output_item.done", item: one });
    const text = (said) => [
        { type: "response.output_text.delta", delta: said },
        item({ id: "msg_1", type: "message", role: "assistant", content: [{ type: "output_text", text: said }] }),
    ];
    const rounds = [
        [item({ id: "mcpl_1", type: "mcp_list_tools", server_label: "sums", tools: [add, look] }),
         item({ id: "mcpr_1", type: "mcp_approval_request", ...call }),
         item({ id: "mcpr_2", type: "mcp_approval_request", ...call, name: "<b>add</b>" })],
        [item({ id: "mcp_1", type: "mcp_call", status: "completed", output: "<i>42</i>", error: null, ...call }),
         ...text("It is 42.")],
        text("Yes."),
    ];
    const own = window.fetch;
    window.sent = [];
    window.fetch = async (url, settings) => {
        if (url === "/v1/tool_servers") return Response.json({ data: [{ label: "sums", tools: [add, look] }] });
        if (url !== "/v1/responses") return own(url, settings);
        window.sent.push(JSON.parse(settings.body));
        const events = [...rounds.shift(), { type: "response.completed", response: { status: "completed", usage } }];
        return new Response(events.map((one) => `event: ${one.type}\\ndata: ${JSON.stringify(one)}\\n\\n`).join(""));
    };
    document.getElementById("key").dispatchEvent(new Event("change"));
"""


def test_tools_of_mcp_servers_are_shown_and_approved(page: Browser, tmp_path: Path) -> None:
    """Nothing is run before a person has said so of each call; what was said is sent on with the items."""
    assert page.run("return document.getElementById('tool-servers').hidden"), "the server has none"
    page.run(TOOL_SERVERS)
    page.wait("document.querySelectorAll('#tool-list > li').length === 1")
    assert "Adds two numbers." in page.text("#tool-list")
    page.run("document.querySelector('#tool-list input').click()")
    page.type("#input", "What is 40 plus 2?" + ENTER)
    page.wait("document.querySelectorAll('.approval').length === 2")
    page.screenshot(tmp_path / "approval.png")
    assert 'sums: <b>add</b>({"a": 40, "b": 2})' in page.text(".approval")
    if AXE.exists():
        assert page.violations(AXE) == []
    page.click(".approval button", "Do not run")
    page.wait("document.querySelectorAll('.approval').length === 1")
    assert len(page.run("return window.sent")) == 1
    page.click(".approval button", "Run")
    page.wait(f"document.querySelector('.call') && {IDLE}")
    assert "<i>42</i>" in page.text(".call")
    assert page.text(".message.assistant .text") == "It is 42."
    page.type("#input", "Sure?" + ENTER)
    answered(page, 2)
    first, second, third = page.run("return window.sent")
    assert [entry["require_approval"] for entry in first["tools"]] == ["always"]
    assert (first["store"], first["max_output_tokens"]) == (False, 20)
    assert [item["type"] for item in second["input"]] == [
        "message",
        "mcp_list_tools",
        *["mcp_approval_request"] * 2,
        *["mcp_approval_response"] * 2,
    ]
    verdicts = {item["approval_request_id"]: item["approve"] for item in second["input"][-2:]}
    assert verdicts == {"mcpr_1": True, "mcpr_2": False}
    more = ["mcp_call", "message", *["mcp_approval_response"] * 2, "message"]
    assert [item["type"] for item in third["input"]][4:] == more
