"""Tokenizers come with models, which need not be trusted: one whose patterns explode is refused before it serves.

Vocabulary and merges cost time and memory in proportion to their file, whose size loaders bound. Patterns and
replacements do not: a few bytes can double a text a hundred times, or search it for years.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fwk.errors import ModelLoadError

TRIAL = Path(__file__).with_name("tokenizer_trial.py")
MAX_FILE_BYTES = 128 << 20
"""Of a tokenizer.json; the largest of real ones have about 40 MB."""

CPU_SECONDS = 5
MEGABYTES = 1024
MAX_STEPS = 64
"""Of normaliser and splitter together; real ones have less than ten."""

MAX_CONTENT = 8
"""Characters of a replacement that needs no trial: marks of spaces and accents."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        _WORDS + r"\p{N}{1,3}" + _REST,
        _WORDS + r"\p{N}" + _REST,
    }
)
"""Patterns of GPT-2's, Llama 3's and Qwen 2's tokenizers: harmless, and not tried at every start."""


def check_tokenizer(tokenizer: Tokenizer, path: object) -> None:
    """Raises ``ModelLoadError`` for a tokenizer whose patterns take too much time or memory. path: of the model."""
    parts = {name: _state(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer")}
    steps = [step for part in parts.values() for step in _steps(part)]
    if len(steps) > MAX_STEPS:
        raise ModelLoadError(
            f"{path}: the tokenizer has {len(steps)} normalisers and splitters, and {MAX_STEPS} at most are "
            "accepted; give another one with --tokenizer-path"
        )
    if any(map(_may_explode, steps)):
        _try(parts, path)


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Every object within, however deep."""
    found = [part]
    while found:
        one = found.pop()
        if isinstance(one, dict):
            if "type" in one:
                yield one
            found.extend(one.values())
        elif isinstance(one, list):
            found.extend(one)


def _may_explode(step: dict[str, Any]) -> bool:
    pattern, content = step.get("pattern"), step.get("content") or step.get("prepend") or ""
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    return len(content) > MAX_CONTENT or (regex is not None and regex not in KNOWN)


def _try(parts: dict[str, Any], path: object) -> None:
    """In a process that the system ends when it takes too much."""
    command = [sys.executable, "-P", str(TRIAL), str(CPU_SECONDS), str(MEGABYTES)]
    done = subprocess.run(command, input=json.dumps(parts), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines()
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        why = f"it takes more than {CPU_SECONDS} seconds of CPU time"
    elif done.returncode < 0 or "memory" in "".join(lines[-1:]):  # native code that gets no memory aborts
        why = f"it takes more than {MEGABYTES} MB of memory"
    else:
        why = lines[-1] if lines else f"it ended with exit code {done.returncode}"
    raise ModelLoadError(
        f"{path}: the tokenizer's normaliser or splitter cannot be used on a text of 16,384 characters: {why}; "
        "give another one with --tokenizer-path"
    )
