"""Keep packed weights in a file that the next start maps (``--weights-cache``), and know which file is whose."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import fwk_layers
from fwk.errors import ConfigError
from fwk.interfaces.feature import LoadedModel, ModelBuild, WorkerPart, WorkerPartContext
from fwk.interfaces.model import ModelContext
from fwk.interfaces.weights_cache import PackedTensors, WeightsCache
from fwk_features.weights_cache import WeightsCacheOptions, file
from fwk_features.weights_cache.unfinished import UnfinishedFile
from fwk_native import refusal
from fwk_process.folders import output_folder

log = logging.getLogger(__name__)

ENDING = ".weights"
MIN_BYTES = 600 << 20
"""Where no folder was named: less than that is packed in a second or two, and not worth the room on the disk."""

SPARED = 0.1
"""Part of the disk that stays free."""

CLOSED_WITHIN = 10.0
"""Seconds that a run which ends waits for what it has begun to write."""


class WeightsCachePart(WorkerPart):
    """Gives each model that is built the file of an earlier start, and writes those of the first ones anew."""

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._options: WeightsCacheOptions = context.options
        self._caches: list[FileCache] = []
        self._served: FileCache | None = None
        self._is_loaded = False

    def model_context(self, context: ModelContext, build: ModelBuild) -> str:
        """Raises ``ConfigError`` for a named folder that cannot be used."""
        wanted = self._options.weights_cache
        if wanted == "none" or not self.context.is_host or refusal() is not None:
            return ""
        is_named = wanted != "auto"
        folder = Path(wanted).expanduser() if is_named else default_folder()
        try:
            trusted(folder)
        except ConfigError as error:
            if is_named:
                raise
            log.warning("packed weights are not kept for the next start: %s", error)
            return ""
        max_bytes = int(self._options.weights_cache_size * 2**30)
        min_bytes = 0 if is_named else MIN_BYTES
        writes = not self._is_loaded  # checkpoints that come later, of a training run, come and go
        cache = FileCache(folder, build, context.weights.skip, min_bytes, max_bytes, writes=writes)
        context.weights_cache = cache
        if writes:
            self._caches.append(cache)
            self._served = cache if build.role == "served" else self._served
        return ""

    def model_loaded(self, loaded: LoadedModel) -> None:
        if self._is_loaded:  # it holds the old weights
            self._caches = [cache for cache in self._caches if cache is not self._served]
            return
        self._is_loaded = True
        for cache in self._caches:
            cache.finish()

    def close(self) -> None:
        for cache in self._caches:
            cache.close()


def default_folder() -> Path:
    """``fwk/weights`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fwk" / "weights"


def trusted(folder: Path) -> None:
    """Make the folder. Raises ``ConfigError`` where that fails, or others could put files into it."""
    status = output_folder(folder, "--weights-cache").stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(f"--weights-cache {folder} belongs to another user (uid {status.st_uid}): name another one")
    if status.st_mode & file.OTHERS_MAY_WRITE:
        raise ConfigError(f"--weights-cache {folder} may be written to by other users: chmod go-w {folder}")


def layers_code() -> str:
    """A hash of the sources of the layers, which decide what is cut, joined and packed."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(Path(fwk_layers.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


class FileCache(WeightsCache):
    """One model's entries in one file. What was not found is written by a thread, as it is made."""

    def __init__(
        self,
        folder: Path,
        build: ModelBuild,
        skip: Callable[[str], None],
        min_bytes: int,
        max_bytes: int,
        *,
        writes: bool = True,
    ) -> None:
        """skip: takes a tensor of the checkpoint for read. writes: whether anything is kept."""
        self._folder, self._build, self._skip = folder, build, skip
        self._min_bytes, self._max_bytes = min_bytes, max_bytes
        self._writes = writes
        self._used: dict[str, file.Entry] = {}
        self._waiting: list[tuple[str, file.Entry]] = []
        self._makers: list[tuple[str, list[str], Callable[[], PackedTensors | None]]] = []
        self._num_read = 0
        self._size = 0  # of all entries
        self._unfinished: UnfinishedFile | None = None
        self._reserved = ExitStack()
        self._jobs = SimpleQueue[tuple[str, file.Entry] | Literal["finish", "stop", "abandon"]]()
        self._writer: threading.Thread | None = None

    @cached_property
    def _key(self) -> str:
        """What the whole file depends on: known once all that change the model have said so."""
        return hashlib.blake2b(f"{layers_code()} {self._build.identity()}".encode(), digest_size=32).hexdigest()

    @cached_property
    def _path(self) -> Path:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", self._build.path.name)[:60]
        return self._folder / f"{name}-{self._key[:24]}{ENDING}"

    def find(self, key: str) -> PackedTensors | None:
        entry = self._found.get(key)
        self._num_read += len(self._build.read_since(self._num_read))
        if entry is None:
            return None
        names: list[str] = entry.facts["read"]
        for name in names:
            self._skip(name)
        self._used[key] = (entry.facts, entry.tensors)
        self._size += file.size_of({key: self._used[key]})
        return entry

    def store(self, key: str, make: Callable[[], PackedTensors | None]) -> None:
        self._makers.append((key, list(self._build.read_since(self._num_read)), make))

    def store_at_once(self, key: str, make: Callable[[], PackedTensors | None]) -> None:
        if self._writes:
            self._keep(key, list(self._build.read_since(self._num_read)), make())

    def _keep(self, key: str, read: list[str], packed: PackedTensors | None) -> None:
        if packed is None:
            return
        entry = ({**packed.facts, "read": read}, packed.tensors)
        self._waiting.append((key, entry))
        self._size += file.size_of({key: entry})
        if self._min_bytes <= self._size <= self._max_bytes:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the thread write what waits."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, daemon=True)
            self._writer.start()
        for job in self._waiting:
            self._jobs.put(job)
        self._waiting.clear()

    def finish(self) -> None:
        """The model is built: have the file completed, if there is anything new, or it was not before."""
        for key, read, make in self._makers:
            self._keep(key, read, make())
        self._makers.clear()
        is_new = self._writer is not None or self._waiting or self._unfinished is not None
        if self._size > self._max_bytes and is_new:
            log.info(
                "packed weights of %.1f GiB are not kept for the next start: --weights-cache-size allows %.1f GiB",
                self._size / 2**30,
                self._max_bytes / 2**30,
            )
            self._jobs.put("abandon")
            if self._writer is None and self._unfinished is not None:
                self._unfinished.abandon()
        elif self._size >= self._min_bytes and is_new:
            self._hand_over()
            self._jobs.put("finish")
            return
        self._jobs.put("stop")
        if self._writer is None:
            self._reserved.close()

    def close(self) -> None:
        """Wait for what is being written, not for long."""
        if self._writer is not None:
            self._jobs.put("stop")
            self._writer.join(CLOSED_WITHIN)
        else:
            self._reserved.close()

    @cached_property
    def _found(self) -> dict[str, PackedTensors]:
        entries: dict[str, file.Entry] = {}
        try:
            entries = file.read(self._path, self._key, self._build.threads)
            os.utime(self._path)  # of what was used last
        except FileNotFoundError:
            entries = self._recovered()
        except file.DamagedFile as error:
            log.warning("%s %s: it is not used, and made again", self._path, error)
        return {key: PackedTensors(tensors, facts) for key, (facts, tensors) in entries.items()}

    def _recovered(self) -> dict[str, file.Entry]:
        """What a start that was stopped had written."""
        if not self._writes or not self._path.with_name(self._path.name + file.TEMPORARY).exists():
            return {}
        try:
            descriptor = self._reserved.enter_context(file.reserved(self._path, keeps=True))
            if descriptor is None:
                return {}
            self._unfinished = UnfinishedFile(descriptor, self._path, self._key)
            entries = self._unfinished.recover(self._build.threads)
        except OSError as error:
            log.warning("packed weights of an earlier start could not be read: %s", error)
            return {}
        size = file.size_of(entries) / 2**30
        log.info("%d packed layers (%.1f GiB) of a start that was stopped are used", len(entries), size)
        return entries

    def _write(self) -> None:
        folder = self._path.parent
        try:
            with self._reserved:
                if self._unfinished is None:
                    descriptor = self._reserved.enter_context(file.reserved(self._path, keeps=True))
                    if descriptor is None:  # another server writes the same
                        return
                    self._unfinished = UnfinishedFile(descriptor, self._path, self._key)
                self._write_all(self._unfinished)
        except OSError as error:
            log.warning("packed weights could not be kept in %s: %s", folder, error)

    def _write_all(self, unfinished: UnfinishedFile) -> None:
        while (job := self._jobs.get()) != "finish":
            if job == "stop":
                return
            if job == "abandon":
                unfinished.abandon()
                return
            _check_disk(self._path.parent, file.size_of({job[0]: job[1]}))
            unfinished.add(*job)
        for key, entry in self._used.items():
            if key not in unfinished:
                unfinished.add(key, entry)
        file.make_room(self._path.parent, ENDING, self._max_bytes - self._size, self._path)
        unfinished.finish()
        size = self._size / 2**30
        log.info("packed weights (%.1f GiB) are kept in %s for the next start", size, self._path)


def _check_disk(folder: Path, size: int) -> None:
    """Raise ``OSError`` when the disk would be nearly full."""
    status = os.statvfs(folder)
    free, spared = status.f_bavail * status.f_frsize, SPARED * status.f_blocks * status.f_frsize
    if free - size < spared:
        raise OSError(f"{size / 2**30:.1f} GiB more would leave less than a tenth of the disk free")
