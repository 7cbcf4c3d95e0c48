"""A running server over TLS and over a unix socket, with named keys and several names."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fwk_kit.testing.serving import TINY
from tests.helpers.zygote import open_fwk


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server, and its process, whose log can be read."""
    (folder / "config.json").write_text(json.dumps(TINY))
    words = ["serve", str(folder), "--load-format", "dummy", "--port", "0", "--max-total-tokens", "2048", *flags]
    with open_fwk(*words) as process:
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r" serves \S+ at (\S+)", line):
                    yield found.group(1), process
                    return
            pytest.fail("".join(lines))
        finally:
            process.kill()


def test_over_tls_by_every_name_with_a_named_key(tmp_path: Path) -> None:
    cert, key, keys = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "keys"))
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words.split(), *names, "-out", cert, "-keyout", key], check=True, capture_output=True)
    Path(keys).write_text("ann key-of-ann\n")
    flags = ["--ssl-certfile", cert, "--ssl-keyfile", key, "--api-key-file", keys, "--log-requests"]
    with served(tmp_path, *flags, "--served-model-name", "one", "two") as (url, process):
        assert url.startswith("https://127.0.0.1:")
        headers = {"authorization": "Bearer key-of-ann"}
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=cert), headers=headers) as http:
            listed = http.get("/v1/models").json()["data"]
            assert [model["id"] for model in listed] == ["one", "two"]
            for name, status in (("one", 200), ("two", 200), ("three", 404)):
                body = {"model": name, "prompt": "Hi", "max_tokens": 2}
                reply = http.post("/v1/completions", json=body)
                assert reply.status_code == status, reply.text
            assert http.get("/server_info").json()["server"]["has_api_key"] is True
        process.terminate()
        assert process.stderr is not None
        log = process.stderr.read()
    assert " of ann: text_completion" in log
    assert "key-of-ann" not in log


@pytest.mark.sweep
def test_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with served(tmp_path, "--uds", str(path)) as (where, process):
        assert where == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://fwk") as http:
            assert http.get("/health").status_code == 200
            assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
        process.terminate()
        process.wait(30)
    assert not path.exists()
