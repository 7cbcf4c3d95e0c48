"""Check 38: what keeps a server from starting is told in one line, soon, and by an exit code of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fwk.errors import ConfigError, EngineDead, FwkError, ModelLoadError, PluginError, PortTaken
from tests.helpers.rig import FAKE, Server, until
from tests.helpers.servers import Start
from tests.helpers.zygote import run_fwk

SOON = 2.0
NOISE = 20.0
"""Seconds that importing on a busy machine may add."""


def ends(*words: str, temporary: Path | None = None, python_path: str | None = None) -> tuple[int, str]:
    """Exit code and last line of ``fwk serve`` with these words; it must end soon and speak plainly.

    Once an engine has begun, the line is one of the log's, and what the log tells besides is left out.
    """
    environment = {**os.environ, **({"TMPDIR": str(temporary)} if temporary else {})}
    if python_path is not None:
        environment["PYTHONPATH"] = python_path
    started = time.monotonic()
    ended = run_fwk("serve", "--device", "cpu", "--load-format", "dummy", *words, environment=environment)
    assert time.monotonic() - started < SOON + NOISE
    lines = [re.sub(r"^[-0-9]{10} [:,0-9]{12} CRITICAL ", "", line) for line in ended.stderr.splitlines()]
    lines = [line for line in lines if not line.startswith("fwk: warning: ") and " INFO " not in line]
    assert "Traceback" not in ended.stderr
    assert lines[-1].startswith(("fwk: error: ", "fwk serve: error: ")), ended.stderr
    return ended.returncode, lines[-1]


def test_each_kind_of_trouble_has_its_code() -> None:
    kinds = (ConfigError, PortTaken, ModelLoadError, PluginError, EngineDead)
    assert len({kind.exit_code for kind in kinds} | {0, 1, 70}) == len(kinds) + 3


def test_a_taken_port(tmp_path: Path) -> None:
    """Told before the model is looked for: there is none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        code, line = ends(str(tmp_path / "no such model"), "--port", port)
    assert code == PortTaken.exit_code
    assert port in line
    assert "choose another --port" in line


@pytest.mark.sweep
def test_an_address_that_is_not_ours(tiny_model: Path) -> None:
    code, line = ends(str(tiny_model), "--host", "192.0.2.1", "--port", "0")
    assert code == PortTaken.exit_code
    assert "192.0.2.1" in line


@pytest.mark.sweep
def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    code, line = ends(str(tmp_path / "nothing"), "--port", "0")
    assert code == ModelLoadError.exit_code
    assert "nothing" in line


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("words", "error", "named"),
    [
        (["--no-such-flag"], ConfigError, "--no-such-flag"),
        (["--page-size", "0"], ConfigError, "--page-size"),
        (["--port", "70000"], ConfigError, "--port"),
        (["--tp-size", "two"], ConfigError, "--tensor-parallel-size: Input should be a valid integer"),
        (["--watchdog-timeout", "0"], ConfigError, "--watchdog-timeout: Input should be greater than 0"),
        (["--tp", "3"], ModelLoadError, "4 heads cannot be shared by 3 ranks"),
        (["--executor", "none-such"], PluginError, "none-such"),
        (["--load-balance-method", "none-such"], PluginError, "none-such"),
    ],
)
def test_a_wrong_option(tiny_model: Path, words: list[str], error: type[FwkError], named: str) -> None:
    code, line = ends(str(tiny_model), *([] if "--port" in words else ["--port", "0"]), *words)
    assert code == error.exit_code
    assert named in line


@pytest.mark.sweep
def test_a_socket_whose_path_would_be_too_long(tiny_model: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    code, line = ends(str(tiny_model), "--port", "0", temporary=deep)
    assert code == EngineDead.exit_code
    assert "set TMPDIR" in line
    assert not list(deep.iterdir()), "nothing is left of it"


@pytest.mark.sweep
def test_what_a_killed_server_left_is_in_nobodys_way(spawn: Start) -> None:
    """Its socket and its folder, as they are found after kill -9 of both; and a port that was in use a moment ago."""
    first = spawn(*FAKE)
    left = next(first.folder.rglob("fwk-tmp-engine-*"))
    copy = first.folder / "copy"
    copy.mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(copy / "engine.sock"))
    first.process.kill()
    first.process.wait(5)
    shutil.move(copy, left)
    port = first.url.rpartition(":")[2]
    second = spawn(*FAKE, "--port", port, environment={"TMPDIR": str(first.folder)})
    assert second.url == first.url
    second.check_invariants()
    assert second.stop() == 0


@pytest.mark.sweep
def test_a_folder_that_cannot_be_written(spawn: Start, tmp_path: Path) -> None:
    """TMPDIR is no folder at all: the system's other ones serve."""
    (tmp_path / "file").write_text("")
    server = spawn(*FAKE, environment={"TMPDIR": str(tmp_path / "file")})
    server.check_invariants()
    assert server.stop() == 0


@pytest.mark.sweep
def test_two_servers_side_by_side(fake: Server, spawn: Start) -> None:
    other = spawn(*FAKE)
    assert other.url != fake.url
    assert other.golden == fake.golden
    assert other.stop() == 0
    fake.check_invariants()


def test_no_code_runs_from_the_current_directory(tiny_model: Path, python_path: str, tmp_path: Path) -> None:
    """``fwk serve .`` in the folder of a downloaded model, as its script starts it; also in helper processes."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for name in ("zmq", "msgspec", "torch", "json"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'a').write('{name} ')\n")
    words = ["serve", ".", "--device", "cpu", "--load-format", "dummy", "--port", "0", "--max-total-tokens", "512"]
    start = [sys.executable, "-P", "-c", "import sys; from fwk.cli.main import main; sys.exit(main())"]
    environment = {**os.environ, "PYTHONPATH": python_path}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*start, *words], cwd=folder, env=environment, stderr=output, stdin=subprocess.DEVNULL
        )
    try:
        until(lambda: process.poll() is not None or " at http:" in log.read_text(), 30, "the ready line")
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(20)
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()
