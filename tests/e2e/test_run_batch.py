"""``fwk run-batch``: with a server of its own, and with one that runs."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fwk.cli.main import main
from fwk_kit.cli.run_batch import Client, answer_all, to_url
from tests.helpers.checkpoints import make_checkpoint


def request(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"prompt": name, "max_tokens": 3} | body}


@pytest.mark.sweep
def test_a_server_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "tiny", "llama")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [request("a"), request("b", temperature=-4), request("c", "/v1/nothing"), request("d") | {"method": "GET"}]
    source.write_text("\n".join([*map(json.dumps, lines), "", "{", json.dumps(request("e"))]))
    flags = [str(tmp_path / "tiny"), "--load-format", "dummy", "--max-total-tokens", "512", "--log-level", "warning"]
    assert main(["run-batch", "-i", str(source), "-o", str(target), *flags]) == 1
    found = list(map(json.loads, target.read_text().splitlines()))
    assert [line["custom_id"] for line in found] == ["a", "b", "c", "d", None, "e"]
    assert [line["response"]["status_code"] for line in found] == [200, 400, 404, 400, 400, 200]
    assert "line 4: method must be POST" in found[3]["response"]["body"]["error"]["message"]
    assert "6 requests answered, 4 with an error" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-i", "/none/such", "-o", "-"], "--input-file: cannot read"),
        (["-i", __file__, "-o", "-", "--concurrency", "0"], "--concurrency must be at least 1"),
        (["-i", __file__, "-o", "-", "--url", "x", "--dtype", "half"], "--dtype is for a server that is started here"),
        (["-i", __file__, "-o", "/none/such", "--url", "x"], "--output-file: cannot write"),
        (["-i", __file__, "-o", "-", "--no-such-flag"], "the server ended before it served"),
    ],
)
def test_wrong_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-batch", *words]) not in (0, 1)
    assert said in capsys.readouterr().err


class Busy(BaseHTTPRequestHandler):
    """Refuses every first try of a request."""

    seen: set[bytes] = set()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status = 200 if body in self.seen else 429
        self.seen.add(body)
        self.send_response(status)
        self.send_header("retry-after", "0.01")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def busy() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_order_and_tries(busy: str) -> None:
    lines = [json.dumps(request(str(i))).encode() for i in range(200)]
    target, client = io.BytesIO(), Client(to_url(busy), None)
    assert answer_all(lines, target, client, 4) == (200, 0)
    client.close()
    assert [json.loads(line)["custom_id"] for line in target.getvalue().splitlines()] == [str(i) for i in range(200)]
