"""A program of its own: what a tokenizer does to texts before it looks tokens up, within limits that end it.

``python -P trial.py CPU_SECONDS MEGABYTES`` with a JSON object on standard input, of the tokenizer's
``normalizer``, ``pre_tokenizer`` and ``decoder``. It ends with exit code 0, or with 1 and a sentence, or by a signal.
"""

from __future__ import annotations

import json
import resource
import sys

from tokenizers import Tokenizer

PROBES = ("a", "1", " ", "\n", "=", "\u3042", "aA", "a1", "a ", "'s", "<a>")
"""Repeated, each ends with what none of them is: where patterns that may match in many ways are slow."""

NUM_CHARACTERS = 16_384
EMPTY = {"type": "BPE", "vocab": {}, "merges": []}


def main() -> None:
    """Normalise, split and decode every probe."""
    seconds, megabytes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    parts = json.load(sys.stdin)
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "model": EMPTY, "added_tokens": []} | parts))
    for probe in PROBES:
        text = probe * (NUM_CHARACTERS // len(probe)) + "\x01"
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        if tokenizer.pre_tokenizer is not None:
            tokenizer.pre_tokenizer.pre_tokenize_str(text)
        if tokenizer.decoder is not None:
            tokenizer.decoder.decode([text])


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        sys.exit("it takes too much memory")
    except BaseException as error:  # the library's panics are no ``Exception``
        sys.exit(f"{type(error).__name__}: {str(error)[:200]}")
