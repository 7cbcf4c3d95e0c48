"""Profiles of a running server's steps: who may take them, where they lie, and what is in them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.http import NO_TLS
from tests.helpers.rig import Server, until
from tests.helpers.servers import Start

ADMIN = {"authorization": "Bearer admin-key"}


def post(server: Server, path: str, body: dict[str, Any] | None = None, status: int = 200) -> dict[str, Any]:
    reply = httpx.post(server.url + path, json=body, headers=ADMIN, verify=NO_TLS, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def generate(server: Server, num_tokens: int) -> None:
    body = {"prompt": "Some words", "max_tokens": num_tokens, "ignore_eos": True}
    assert server.post(body).status_code == 200


def steps_in(path: Path) -> list[str]:
    """The names of the ranges of steps in a trace, in their order."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("step ")]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module", params=["alone", "ranks of replicas"])
def server(spawn: Start, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Server:
    """With a folder for profiles, ``folder``."""
    folder = tmp_path_factory.mktemp("profiles")
    flags = [] if request.param == "alone" else ["--tensor-parallel-size", "2", "--data-parallel-size", "2"]
    found = spawn("--profiler-dir", str(folder), "--admin-api-key", "admin-key", *flags)
    found.folder = folder  # type: ignore[attr-defined]
    found.num_files = 4 if flags else 1  # type: ignore[attr-defined]
    return found


def test_a_profile_has_the_steps_of_every_worker(server: Any) -> None:
    begun = post(server, "/start_profile", {"profile_id": "one", "record_shapes": True})
    assert begun["output_dir"] == str(server.folder)
    generate(server, 5)
    paths = [Path(path) for path in post(server, "/stop_profile")["files"]]
    assert len(paths) == server.num_files
    assert sorted(server.folder.glob("one-*")) == sorted(paths)
    names = [steps_in(path) for path in paths]
    steps = max(names, key=len)
    assert steps[0].startswith("step 0: 1 sequences")
    assert [name.partition(":")[2] for name in steps[1:5]] == [" 1 sequences, 1 tokens"] * 4
    for path in paths:
        assert path.stat().st_mode & 0o77 == 0 or path.parent.stat().st_mode & 0o77 == 0


def test_it_ends_by_itself_after_so_many_steps(server: Any) -> None:
    post(server, "/start_profile", {"num_steps": 2, "output_dir": "sub", "activities": ["CPU", "MEM"]})
    for _ in range(4):
        generate(server, 4)  # each of two engines has two of them
    until(lambda: len(list((server.folder / "sub").glob("[!.]*"))) == server.num_files, 60, "a trace of each worker")
    paths = [Path(path) for path in post(server, "/stop_profile")["files"]]
    assert all(len(steps_in(path)) == 2 for path in paths)


def test_what_cannot_be_had_is_refused_and_harms_nothing(server: Any) -> None:
    os.mkfifo(server.folder / "fifo")
    for body, word in (
        ({"output_dir": "fifo"}, "is not a folder"),
        ({"output_dir": "fifo/in"}, "is not a folder"),
        ({"activities": ["GPU"]}, "no GPU"),
        ({"activities": ["RPD"]}, "RPD"),
        ({"output_dir": "/tmp"}, "output_dir"),
        ({"output_dir": "../x"}, "output_dir"),
        ({"profile_id": "../x"}, "profile_id"),
        ({"num_steps": 10**6}, "--profiler-max-steps"),
        ({"profile_by_stage": True}, "profile_by_stage"),
    ):
        assert word in json.dumps(post(server, "/start_profile", body, status=400)), body
    post(server, "/start_profile", {"profile_id": "twice"})
    assert "under way" in json.dumps(post(server, "/start_profile", status=400))
    post(server, "/stop_profile")
    assert "another profile_id" in json.dumps(post(server, "/start_profile", {"profile_id": "twice"}, status=400))
    post(server, "/start_profile", {"profile_id": "again"})
    post(server, "/stop_profile")
    generate(server, 2)


def test_what_benchmarks_send(server: Any) -> None:
    vllm = {"prompt": "Some words", "max_tokens": 4, "temperature": 0.0, "stream": True}
    sglang = {"num_steps": None, "activities": ["CPU"], "profile_by_stage": False, "merge_profiles": False}
    for body in (vllm, sglang):
        post(server, "/start_profile", body)
        generate(server, 2)
        assert len(post(server, "/stop_profile")["files"]) == server.num_files


def test_only_the_administrator_may(server: Any) -> None:
    for path in ("/start_profile", "/stop_profile"):
        assert httpx.post(server.url + path, verify=NO_TLS).status_code == 401
    order = {"family": "observers", "name": "profiler", "options": {"profiler_dir": "/tmp"}}
    assert "when they start" in json.dumps(post(server, "/plugins/switch", order, status=400))
