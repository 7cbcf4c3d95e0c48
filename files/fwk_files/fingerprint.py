"""Whether files of a model are still the same, by their names, sizes, times and samples: sooner told than by a hash."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from fwk_files.regular import open_regular

SAMPLE_BYTES = 4096
SAMPLE_EVERY = 2**20
"""A file of 10 GB takes 10,000 reads: about 0.1 s when the weights have just been loaded."""


def fingerprint(path: Path, weights_identity: str = "") -> str:
    """The same for the same files of a model, as far as ``known_files`` knows them, and the same other weights."""
    known = json.dumps([known_files(path), weights_identity]).encode()
    return hashlib.blake2b(known, digest_size=16).hexdigest()


def known_files(path: Path) -> list[tuple[str, int, int, str]]:
    """Name, size, time of change and samples of every file of a model."""
    path = path.resolve()
    return [
        (str(file.relative_to(path.parent)), file.stat().st_size, file.stat().st_mtime_ns, _sampled(file))
        for file in _files(path)
    ]


def _files(path: Path) -> list[Path]:
    """Those of a model: below its folder, in order, or itself."""
    return [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]


def _sampled(file: Path) -> str:
    """A hash of a piece of every ``SAMPLE_EVERY`` bytes, the last piece among them."""
    digest = hashlib.blake2b(digest_size=16)
    with open_regular(file) as source:
        size = os.fstat(source.fileno()).st_size
        for start in [*range(0, size, SAMPLE_EVERY), max(size - SAMPLE_BYTES, 0)]:
            digest.update(os.pread(source.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()
