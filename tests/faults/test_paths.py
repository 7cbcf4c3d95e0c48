"""Paths among the options of ``fwk serve``: what is no file, or no folder, ends the start in one sentence."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fwk.plugins import discover, option_owners
from fwk.plugins.options import flag
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.zygote import run_fwk

BEGIN = ("serve", "--device", "cpu", "--load-format", "dummy", "--port", "0")
SECONDS = 25.0
"""Of a start that is refused, on a busy machine."""

PATHS = re.compile(
    r"(.*_)?(file|dirs?|directory|folder|paths?|location|certs|certfile|keyfile|template|catalogue|lock|cache|uds|model"
    r"|config|corpus|socket|output)"
)
"""Names of options that may take a path."""

NO_PATHS = {
    "prefix_cache": "a plugin's name",
    "kv_events_config": "JSON",
    "lora_paths": "NAME=FOLDER, tried as such",
    "download_dir": "not used by a model that is here",
    "plugin_catalogue": "read where a plugin is missing",
}

WITH = {
    "--model": [],
    "--ssl-keyfile": ["--ssl-certfile", "{pem}"],
    "--ssl-ca-certs": ["--ssl-certfile", "{pem}"],
    "--ds-channel-config-path": ["--attention-backend", "double_sparsity"],
    "--speculative-draft-model-path": ["--speculative-algorithm", "standalone"],
    "--speculative-ngram-external-corpus-path": ["--speculative-algorithm", "ngram"],
    "--lora-dirs": ["--admin-api-key", "k", "--enable-lora"],
    "--hicache-storage-dir": ["--prefix-cache", "hierarchical"],
    "--dist-token-file": ["--tp-size", "2", "--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "127.0.0.1:5"],
    "--expert-distribution-recorder-folder": ["--admin-api-key", "k"],
    "--profiler-dir": ["--admin-api-key", "k"],
    "--debug-tensor-dump-output-folder": ["--debug-tensor-dump-layers", "0"],
    "--init-expert-location": ["--model", "{experts}"],
    "--disaggregation-token-file": ["--disaggregation-mode", "prefill"],
    "--weights-cache": ["--quantization", "int8"],
}
"""What an option needs alongside it to mean something."""


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[list[Path]]:
    """A FIFO that has no writer, a socket, an endless device, and a link to itself."""
    fifo, listening, loop = tmp_path / "fifo", tmp_path / "socket", tmp_path / "loop"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(listening))
        yield [fifo, listening, Path("/dev/zero"), loop]


def path_options() -> list[str]:
    found = {
        name
        for owner in option_owners(discover())
        for name, field in owner.model.model_fields.items()
        if PATHS.fullmatch(name) and "str" in str(field.annotation)
    }
    assert found >= NO_PATHS.keys()
    return sorted(flag(name) for name in found - NO_PATHS.keys())


@pytest.mark.sweep
@pytest.mark.timeout(1_200)
def test_no_option_waits_for_what_is_no_file(odd: list[Path], tiny_model: Path, tmp_path: Path) -> None:
    wrong: list[str] = []
    experts = tmp_path / "experts"
    make_checkpoint(experts, "qwen3_moe")
    pem = tmp_path / "cert.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run([*words.split(), "-out", str(pem), "-keyout", str(tmp_path / "key.pem")], check=True, timeout=60)
    names = {"pem": str(pem), "experts": str(experts)}
    for option in [*path_options(), "--lora-paths"]:
        for path in odd:
            if option == "--uds" and path.name == "socket":  # of a server that has died: the next takes its place
                continue
            given = [word.format(**names) for word in WITH.get(option, ["--model", str(tiny_model)])]
            if option not in ("--model", "--init-expert-location") and "--model" not in given:
                given += ["--model", str(tiny_model)]
            value = f"name={path}" if option == "--lora-paths" else str(path)
            try:
                ended = run_fwk(*BEGIN, *given, option, value, seconds=SECONDS)
            except subprocess.TimeoutExpired:
                wrong.append(f"{option} {path.name}: it serves, or waits")
                continue
            told = [line for line in ended.stderr.splitlines() if "error: " in line or "CRITICAL" in line]
            is_named = any(path.name in line or option in line for line in told)
            if ended.returncode in (0, 1, 70) or "Traceback" in ended.stderr or not is_named:
                wrong.append(f"{option} {path.name}: {ended.returncode}: {told or ended.stderr[-300:]}")
    assert not wrong, "\n".join(wrong)
