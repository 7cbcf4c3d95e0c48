"""A headless Chromium, driven through chromedriver by the WebDriver protocol (W3C)."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.ports import free_port

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
WHERE = ("chromedriver", "chromium")


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in WHERE if shutil.which(name) is None]


class Browser:
    """One page."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, session

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        reply = self._http.request(method, f"/session/{self._session}{path}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["value"]

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """What a function with this body returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        return self.run("return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''", selector)

    def click(self, selector: str, text: str = "") -> None:
        """The last element of those that hold ``text``; as a person would, so it must be visible."""
        found = self.run(
            "const all = [...document.querySelectorAll(arguments[0])];"
            " return all.filter((one) => one.textContent.includes(arguments[1])).at(-1)",
            selector,
            text,
        )
        self._ask("POST", f"/element/{next(iter(found.values()))}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Key by key; "\ue007" is Enter."""
        found = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        element = next(iter(found.values()))
        self._ask("POST", f"/element/{element}/clear", {})
        self._ask("POST", f"/element/{element}/value", {"text": text})

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"return !!({condition})"):
            assert time.monotonic() < end, f"{condition} is still false; the page says: {self.text('body')}"
            time.sleep(0.05)

    def size(self, width: int, height: int) -> None:
        self._ask("POST", "/window/rect", {"width": width, "height": height})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def violations(self, axe: Path) -> list[str]:
        """What axe-core, a script of that name, finds wrong for people with a screen reader or a keyboard."""
        self.run(axe.read_text())
        check = "const done = arguments[0]; axe.run().then((found) => done(found.violations.map((one) => one.help)))"
        return self._ask("POST", "/execute/async", {"script": check, "args": []})

    def log(self) -> list[str]:
        """Errors that the browser reported."""
        found = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] == "SEVERE"]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with one page."""
    port = free_port()
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            wanted = {"browserName": "chrome", "goog:loggingPrefs": {"browser": "ALL"}}
            wanted["goog:chromeOptions"] = {"args": FLAGS, "binary": shutil.which("chromium")}
            for _ in range(100):
                try:
                    reply = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            else:
                raise AssertionError("chromedriver does not answer")
            assert reply.status_code == 200, reply.text
            session = reply.json()["value"]["sessionId"]
            yield Browser(http, session)
            http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait()
