"""Tokenizers come with models, which need not be trusted: one whose patterns explode is refused before it serves.

Vocabulary and merges cost time and memory in proportion to their file, whose size loaders bound. Patterns and
replacements do not: a few bytes can double a text a hundred times, or search it for years. What replacements can make
of a text is counted (``fwk_tokenizer.bounds``), and what patterns take is tried.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordPiece

from fwk_errors import ModelLoadError
from fwk_tokenizer.bounds import check_tokenizer_parts, parts_of, steps

TRIAL = Path(__file__).with_name("trial.py")
MAX_FILE_BYTES = 128 << 20
"""Of a tokenizer.json; the largest of real ones have about 40 MB."""

CPU_SECONDS = 5
MEGABYTES = 1024
MAX_WORD = 200
"""Characters of a word that WordPiece splits, in time that grows with their square; all have 100."""

MAX_PIECE = 256
"""Characters of a piece of Unigram, which searches up to the longest at every place; real ones have 16."""

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
    parts = parts_of(tokenizer)
    check_tokenizer_parts(parts, path)
    model: Any = tokenizer.model
    if isinstance(model, WordPiece) and model.max_input_chars_per_word > MAX_WORD:
        raise ModelLoadError(
            f"{path}: the tokenizer splits words of {model.max_input_chars_per_word} characters "
            f"(max_input_chars_per_word); {MAX_WORD} at most are accepted; give another one with --tokenizer-path"
        )
    if isinstance(model, Unigram):
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=False)), default=0)
        if longest > MAX_PIECE:
            raise ModelLoadError(
                f"{path}: the tokenizer has a piece of {longest} characters; {MAX_PIECE} at most are accepted of a "
                "Unigram model; give another one with --tokenizer-path"
            )
    del parts["post_processor"]
    if any(_may_explode(step) for part in parts.values() for step in steps(part)):
        _try(parts, path)


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
        f"{path}: the tokenizer's normaliser, splitter or decoder cannot be used on a text of 16,384 characters: "
        f"{why}; give another one with --tokenizer-path"
    )
