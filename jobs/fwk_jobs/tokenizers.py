"""A tokenizer.json made of a vocabulary file, in a process with limits (``convert_tokenizer.py``)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PROGRAM = Path(__file__).with_name("convert_tokenizer.py")
CPU_SECONDS = 300
MEGABYTES = 8192
VOCABULARIES = ("tokenizer.model", "tiktoken.model", "tekken.json")
"""sentencepiece's and tiktoken's, tiktoken's, and mistral-common's, in the order they are looked for."""

BESIDE = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""What else the converters read."""

EXTRA = "tokenizers"
"""Of the distribution, with what converting needs."""

PACKAGES = ("transformers", "sentencepiece", "google.protobuf", "tiktoken")


class ConversionFailed(Exception):
    """Why a file became no tokenizer, in a few words."""


def missing_packages() -> list[str]:
    """What converting needs and is not installed."""
    return [name.rpartition(".")[2] for name in PACKAGES if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def version() -> str:
    """Of the converters: with another one, the same files may become something else."""
    return importlib.metadata.version("transformers")


def convert(contents: Mapping[str, bytes], kept: Path) -> None:
    """Convert the files of a folder, by name, and keep the tokenizer.json as ``kept``.

    Raises ``ConversionFailed``, or ``OSError`` where nothing can be kept.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as name:
        folder = Path(name)
        for file, data in contents.items():
            (folder / file).write_bytes(data)
        result = folder / "result"
        command = [sys.executable, "-P", str(PROGRAM), name, str(result), str(CPU_SECONDS), str(MEGABYTES)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConversionFailed(_why(done))
        result.replace(kept)


def _why(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {CPU_SECONDS} seconds of CPU time"
    if done.returncode < 0 or "memory" in "".join(lines[-1:]):  # native code that gets no memory aborts
        return f"it takes more than {MEGABYTES} MB of memory"
    return lines[-1] if lines else f"it ended with exit code {done.returncode}"
