"""Make the pictures of the page in ``docs/pictures``: python -m tests.helpers.screenshots [MODEL]

Needs Chromium and chromedriver, as the page's tests do. Look at what it made before it is committed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.helpers.browser import Browser, browser, missing
from tests.helpers.ports import free_port

PICTURES = Path(__file__).parents[2] / "docs/pictures"
QUESTION = "Write a list of three things to see in Rome, with a short reason for each."
LONG = "Write a long story about a lighthouse keeper and a whale."
IDLE = "document.getElementById('stop').hidden && document.querySelectorAll('.message.assistant').length"
DESKTOP = 1040, 800
ENTER = "\ue007"


@contextlib.contextmanager
def served(words: list[str]) -> Iterator[str]:
    """The address of a server, once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "fwk", "serve", *words, "--port", str(port)]
    with subprocess.Popen(command) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            while server.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def take(page: Browser, url: str) -> None:
    """A chat by day, token probabilities by night, the server's panel, and a phone's view."""
    page.size(*DESKTOP)
    page.open(url)
    page.wait("document.getElementById('model').value")
    page.run("document.documentElement.dataset.theme = 'light'")
    page.click("#show-settings")
    page.type("#max_tokens", "120")
    page.type("#temperature", "0")
    page.type("#input", QUESTION + ENTER)
    page.wait(IDLE, 120)
    page.screenshot(PICTURES / "chat-light.png")
    page.click("#show-settings")
    page.size(420, 800)
    page.screenshot(PICTURES / "phone-light.png")
    page.size(*DESKTOP)
    page.click("#show-settings")
    page.click("#theme")
    page.click("#logprobs")
    page.click(".message.assistant button", "Try again")
    page.wait(f"{IDLE} && document.querySelectorAll('.token').length", 120)
    page.run("document.querySelectorAll('.token')[5].focus()")
    page.screenshot(PICTURES / "tokens-dark.png")
    page.run("document.getElementById('max_tokens').value = 600")
    page.click("#show-server")
    page.wait("document.querySelectorAll('.chart').length === 6")
    page.click("#new")
    page.type("#input", LONG + ENTER)
    time.sleep(8)  # charts of a few moments
    page.screenshot(PICTURES / "server-dark.png")


def main() -> int:
    """Make all pictures."""
    if missing():
        raise SystemExit(f"not installed: {', '.join(missing())}")
    PICTURES.mkdir(exist_ok=True)
    with served(sys.argv[1:]) as url, browser() as page:
        take(page, url)
    for path in sorted(PICTURES.glob("*.png")):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
