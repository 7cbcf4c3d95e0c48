"""Batches and background responses end once, whichever of a server's processes is killed meanwhile."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.rig import FAKE, Server, until
from tests.helpers.servers import Start

pytestmark = pytest.mark.sweep

SLOW = (*FAKE, "--fake-step-ms", "20", "--batch-concurrency", "4")
NUM_LINES = 40
MEGABYTE = 2**20


def post(server: Server, path: str, **given: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", timeout=60, **given)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_batch_outlives_the_api_process(spawn: Start, tmp_path: Path) -> None:
    flags = (*SLOW, "--files-dir", str(tmp_path), "--max-files-bytes", str(64 * MEGABYTE))
    server = spawn(*flags)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
    told = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(NUM_LINES)
    ]
    lines = "\n".join([*map(json.dumps, told), "{"])
    before = psutil.Process(server.process.pid).memory_info().rss
    large = (b"x" * 1023 + b"\n") * 1024 * 40
    big = post(server, "/v1/files", data={"purpose": "batch"}, files={"file": ("big", large)})
    assert big["bytes"] == len(large), "larger than --max-body-bytes"
    assert psutil.Process(server.process.pid).memory_info().rss - before < 30 * MEGABYTE
    too_large = httpx.post(
        f"{server.url}/v1/files", data={"purpose": "batch"}, files={"file": ("big", large)}, timeout=60
    )
    assert "--max-files-bytes" in too_large.text
    file = post(server, "/v1/files", data={"purpose": "batch"}, files={"file": ("in", lines)})
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    at = f"/v1/batches/{post(server, '/v1/batches', json=asked)['id']}"
    background = post(server, "/v1/responses", json={"input": "Hi", "background": True, "max_output_tokens": 200})
    until(lambda: server.get(at).json()["request_counts"]["completed"] > 4, 20, "answers")
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    server = spawn(*flags)
    until(lambda: server.get(at).json()["status"] == "completed", 30, "the end of the batch")
    batch = server.get(at).json()
    assert batch["request_counts"] == {"total": NUM_LINES + 1, "completed": NUM_LINES, "failed": 1}
    output = server.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    assert sorted(int(json.loads(line)["custom_id"]) for line in output) == list(range(NUM_LINES)), "each once"
    ends = ("completed", "incomplete")
    until(lambda: server.get(f"/v1/responses/{background['id']}").json()["status"] in ends, 30, "the response")
    assert server.get(f"/v1/files/{big['id']}").json() == big
    server.check_invariants()


def test_a_background_response_outlives_the_engine(spawn: Start) -> None:
    server = spawn(*SLOW, "--health-monitor")
    asked = {"input": "Hi", "background": True, "max_output_tokens": 100, "temperature": 0}
    untouched = post(server, "/v1/responses", json={**asked, "background": False})
    streamed = post(server, "/v1/responses", json=asked)
    at = f"/v1/responses/{streamed['id']}"
    until(lambda: server.metric("fwk:num_requests_running") == 1, 20, "its first step")
    time.sleep(0.3)  # some of its 100 steps
    server.signal_engine(signal.SIGKILL)
    until(lambda: server.get(at).json()["status"] not in ("queued", "in_progress"), 60, "the response")
    ended = server.get(at).json()
    assert ended["status"] == untouched["status"], ended["error"]
    assert [item["content"] for item in ended["output"]] == [item["content"] for item in untouched["output"]]
    assert (ended["id"], ended["created_at"]) == (streamed["id"], streamed["created_at"])
    server.take_new_engine()
    server.check_invariants()
