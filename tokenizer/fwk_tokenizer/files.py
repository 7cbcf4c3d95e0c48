"""Where the served model's tokenizer comes from: a tokenizer.json, or a vocabulary file that is converted to one.

Vocabulary files are converted in a process with limits (``fwk_jobs``); the result is kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from fwk_errors import ModelLoadError
from fwk_files.regular import read_regular
from fwk_jobs import tokenizers as conversion
from fwk_tokenizer.bounds import load_tokenizer
from fwk_tokenizer.check import MAX_FILE_BYTES

FAST = "tokenizer.json"
MAX_BESIDE_BYTES = 32 << 20
"""Of each other file that the converters read."""


class ModelFiles(Protocol):
    """A model's folder or file, with a tokenizer of its own."""

    path: Path

    def tokenizer(self) -> Tokenizer:
        """Its own. Raises ``ModelLoadError``."""
        ...


class TokenizerOptions(Protocol):
    """Which is to be used in place of the model's own: ``--tokenizer-path``, ``--tokenizer-mode``."""

    @property
    def tokenizer_path(self) -> str | None: ...
    @property
    def tokenizer_mode(self) -> str: ...


def read_tokenizer(checkpoint: ModelFiles, options: TokenizerOptions) -> Tokenizer:
    """The tokenizer that ``--tokenizer-path`` and ``--tokenizer-mode`` ask for. Raises ``ModelLoadError``."""
    given = Path(options.tokenizer_path).expanduser() if options.tokenizer_path else None
    place = Path(checkpoint.path) if given is None else given
    vocabulary = None if options.tokenizer_mode == "fast" else _vocabulary(place)
    if options.tokenizer_mode == "slow" and vocabulary is None:
        names = ", ".join(conversion.VOCABULARIES)
        raise ModelLoadError(
            f"--tokenizer-mode slow: {place} has no vocabulary file ({names}) to make a tokenizer of; "
            "auto reads its tokenizer.json"
        )
    is_there = place.is_dir() and (place / FAST).is_file()
    if vocabulary is not None and (options.tokenizer_mode == "slow" or not is_there):
        return _converted(vocabulary)
    if given is None:
        return checkpoint.tokenizer()
    return _from_file(given / FAST if given.is_dir() else given)


def _vocabulary(place: Path) -> Path | None:
    """The vocabulary file at ``place``, a folder or the file itself."""
    if place.is_file():
        return place if place.name in conversion.VOCABULARIES else None
    return next((place / name for name in conversion.VOCABULARIES if (place / name).is_file()), None)


def _from_file(file: Path) -> Tokenizer:
    if not file.is_file():
        raise ModelLoadError(f"--tokenizer-path: there is no {file}")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ModelLoadError(
            f"--tokenizer-path: {file} is larger than {MAX_FILE_BYTES >> 20} MB, which no tokenizer is"
        )
    return load_tokenizer(read_regular(file, MAX_FILE_BYTES), f"--tokenizer-path: {file}")


def _converted(vocabulary: Path) -> Tokenizer:
    missing = conversion.missing_packages()
    if missing:
        raise ModelLoadError(
            f"{vocabulary}: no tokenizer.json is used, and to convert this file it needs {', '.join(missing)}: "
            f"pip install 'fwk[{conversion.EXTRA}]'"
        )
    contents = _contents(vocabulary)
    kept = _kept(contents)
    try:
        if not kept.is_file():
            conversion.convert(contents, kept)
    except conversion.ConversionFailed as error:
        raise ModelLoadError(
            f"{vocabulary} cannot be converted to a tokenizer: {error}; give a tokenizer.json with --tokenizer-path"
        ) from None
    except OSError as error:
        raise ModelLoadError(
            f"{vocabulary}: no folder to keep the converted tokenizer in: {error}; name another in XDG_CACHE_HOME"
        ) from None
    try:
        return load_tokenizer(read_regular(kept, MAX_FILE_BYTES), kept)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{kept}, made of {vocabulary}, is damaged ({error}); remove it") from None


def _contents(vocabulary: Path) -> dict[str, bytes]:
    """The vocabulary file and those beside it that the converters read, by name."""
    contents: dict[str, bytes] = {}
    beside = [(vocabulary.with_name(name), MAX_BESIDE_BYTES) for name in conversion.BESIDE]
    for path, most in [(vocabulary, MAX_FILE_BYTES), *beside]:
        if not path.is_file():
            continue
        if path.stat().st_size > most:
            raise ModelLoadError(f"{path}: larger than {most >> 20} MB, which no such file is")
        contents[path.name] = read_regular(path, most)
    return contents


def _kept(contents: dict[str, bytes]) -> Path:
    """Where what becomes of ``contents`` is kept: by their hash, and the converters' version."""
    digest = hashlib.sha256(conversion.version().encode())
    for name, data in sorted(contents.items()):
        digest.update(b"%s %d " % (name.encode(), len(data)))
        digest.update(data)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "fwk" / "tokenizers" / f"{digest.hexdigest()}.json"
