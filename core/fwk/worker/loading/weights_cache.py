"""Keep packed weights in a file that the next start maps (``--weights-cache``), and know which file is whose."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fwk.config import Config
from fwk.errors import ConfigError
from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.weights_cache import NO_WEIGHTS_CACHE, PackedTensors, WeightsCache
from fwk.layers import sharding
from fwk.native import cpu_flags, isa, refusal, weights_file
from fwk.native.thread_pool import ThreadPool
from fwk.plugins import PluginSet
from fwk.setup.checkpoint import OpenedModel
from fwk.setup.resolve import ModelSetup
from fwk.worker.kv.identity import known_files
from fwk.worker.loading.weights import TrackedWeights

log = logging.getLogger(__name__)

ENDING = ".weights"
MIN_BYTES = 600 << 20
"""Where no folder was named: less than that is packed in a second or two, and not worth the room on the disk."""

SPARED = 0.1
"""Part of the disk that stays free."""

CLOSED_WITHIN = 10.0
"""Seconds that a run which ends waits for what it has begun to write."""

_OPTIONS = (
    "quantization", "quantization_exclude", "quantization_layers", "enable_fp32_lm_head", "expert_parallel_size",
)  # fmt: skip
_FAMILIES = ("quant", "loaders", "models", "moe")


def open_cache(
    config: Config,
    setup: ModelSetup,
    opened: OpenedModel,
    weights: TrackedWeights,
    group: ParallelGroup,
    threads: ThreadPool,
    role: str,
    features: Sequence[str] = (),
) -> WeightsCache:
    """The cache of one model in the role ``served``, ``draft`` or ``head``.

    features: what those that change its weights say (``WorkerPart.model_context``). Raises ``ConfigError`` for a named
    folder that cannot be used.
    """
    wanted = config.model.weights_cache
    if wanted == "none" or not setup.device.is_host or refusal() is not None:
        return NO_WEIGHTS_CACHE
    is_named = wanted != "auto"
    folder = Path(wanted).expanduser() if is_named else default_folder()
    try:
        trusted(folder)
    except ConfigError as error:
        if is_named:
            raise
        log.warning("packed weights are not kept for the next start: %s", error)
        return NO_WEIGHTS_CACHE
    key = _key(config, setup, opened, group, role, features)
    max_bytes = int(config.model.weights_cache_size * 2**30)
    return FileCache(_path(folder, opened, key), key, weights, threads, 0 if is_named else MIN_BYTES, max_bytes)


def default_folder() -> Path:
    """``fwk/weights`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fwk" / "weights"


def trusted(folder: Path) -> None:
    """Make the folder. Raises ``ConfigError`` where that fails, or others could put files into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"--weights-cache {folder}: no such folder can be made: {error.strerror}") from None
    if status.st_uid != os.geteuid():
        raise ConfigError(f"--weights-cache {folder} belongs to another user (uid {status.st_uid}): name another one")
    if status.st_mode & weights_file.OTHERS_MAY_WRITE:
        raise ConfigError(f"--weights-cache {folder} may be written to by other users: chmod go-w {folder}")


def _path(folder: Path, opened: OpenedModel, key: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", opened.path.name)[:60]
    return folder / f"{name}-{key[:24]}{ENDING}"


def _key(
    config: Config, setup: ModelSetup, opened: OpenedModel, group: ParallelGroup, role: str, features: Sequence[str]
) -> str:
    """What a whole file depends on. Its entries have keys of their own, with the kernels' versions.

    A file's time of change (ctime) is in it, which nobody can set: bytes between samples that were written in place.
    """
    path = opened.path.resolve()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    remote = opened.checkpoint.weights_identity()
    known: dict[str, Any] = {
        "layers": _sources(Path(sharding.__file__).parent),
        "files": known_files(path),
        "changed": [file.stat().st_ctime_ns for file in files],
        "weights": remote,
        "loader": [opened.loader, _code(setup.factory.plugins, "loaders", opened.loader)],
        "model": _code(setup.factory.plugins, "models", setup.factory.item("models").name),
        "config": dict(opened.config.raw),
        "task": [opened.task, role],
        "dtype": setup.facts.dtype,
        "machine": [isa(), sorted(cpu_flags()), sys.byteorder],
        "engine": {name: getattr(config.engine, name) for name in _OPTIONS},
        "options": {
            name: dict(values)
            for name, values in sorted(config.plugin_options.items())
            if name.partition(".")[0] in _FAMILIES and not (remote and name.startswith("loaders."))
        },
        "features": list(features),
        "rank": [group.rank, group.size],
    }
    return hashlib.blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=32).hexdigest()


def _code(plugins: PluginSet, family: str, name: str) -> str:
    """Of a plugin that decides what a tensor's numbers are: its version, and its files while that is the same."""
    item = plugins.by_family[family][name]
    try:
        module = importlib.util.find_spec(item.declaration.load.partition(":")[0])  # which may not be imported yet
    except ValueError:  # made by hand, of no file
        module = None
    source = module.origin if module is not None and module.has_location else None
    named = f"{item.package} {item.version} {item.declaration.load}"
    return f"{named} {_sources(Path(source).parent)}" if source else named


def _sources(folder: Path) -> str:
    """A hash of a folder's sources."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.iterdir()):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


class FileCache(WeightsCache):
    """One model's entries in one file. ``finish`` writes it anew, in a thread, if anything was not found."""

    def __init__(
        self, path: Path, key: str, weights: TrackedWeights, threads: ThreadPool, min_bytes: int, max_bytes: int
    ) -> None:
        self._path, self._key, self._weights = path, key, weights
        self._min_bytes, self._max_bytes = min_bytes, max_bytes
        self._found: dict[str, PackedTensors] = {}
        self._used: dict[str, weights_file.Entry] = {}
        self._makers: list[tuple[str, list[str], Callable[[], PackedTensors | None]]] = []
        self._num_read = 0
        self._writer: threading.Thread | None = None
        self._read(threads)

    @property
    def is_complete(self) -> bool:
        """Whether everything asked for so far was found."""
        return bool(self._used) and not self._makers

    def find(self, key: str) -> PackedTensors | None:
        entry = self._found.get(key)
        self._num_read = self._weights.num_read
        if entry is None:
            return None
        names: list[str] = entry.facts["read"]
        for name in names:
            self._weights.skip(name)
        self._used[key] = (entry.facts, entry.tensors)
        return entry

    def store(self, key: str, make: Callable[[], PackedTensors | None]) -> None:
        self._makers.append((key, self._weights.read_since(self._num_read), make))

    def finish(self) -> None:
        """The model is built: begin to write, if there is anything new."""
        made = [(key, read, make()) for key, read, make in self._makers]
        self._makers.clear()
        new = {
            key: ({**packed.facts, "read": read}, packed.tensors) for key, read, packed in made if packed is not None
        }
        entries = {**self._used, **new}
        size = weights_file.size_of(entries)
        if not new or size < self._min_bytes:
            return
        if size > self._max_bytes:
            log.info(
                "packed weights of %.1f GiB are not kept for the next start: --weights-cache-size allows %.1f GiB",
                size / 2**30,
                self._max_bytes / 2**30,
            )
            return
        self._writer = threading.Thread(target=self._write, args=(entries, size), daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Wait for what is being written, not for long."""
        if self._writer is not None:
            self._writer.join(CLOSED_WITHIN)

    def _read(self, threads: ThreadPool) -> None:
        try:
            entries = weights_file.read(self._path, self._key, threads)
            os.utime(self._path)  # of what was used last
        except FileNotFoundError:
            return
        except weights_file.DamagedFile as error:
            log.warning("%s %s: it is not used, and made again", self._path, error)
            return
        self._found = {key: PackedTensors(tensors, facts) for key, (facts, tensors) in entries.items()}

    def _write(self, entries: dict[str, weights_file.Entry], size: int) -> None:
        try:
            weights_file.make_room(self._path.parent, ENDING, self._max_bytes - size)
            _check_disk(self._path.parent, size)
            with weights_file.reserved(self._path) as descriptor:
                if descriptor is not None:  # otherwise another server writes the same
                    weights_file.write(descriptor, self._path, self._key, entries)
                    log.info("packed weights (%.1f GiB) are kept in %s for the next start", size / 2**30, self._path)
        except OSError as error:
            log.warning("packed weights could not be kept in %s: %s", self._path.parent, error)


def _check_disk(folder: Path, size: int) -> None:
    """Raise ``OSError`` when the disk would be nearly full."""
    status = os.statvfs(folder)
    free, spared = status.f_bavail * status.f_frsize, SPARED * status.f_blocks * status.f_frsize
    if free - size < spared:
        raise OSError(f"{size / 2**30:.1f} GiB more would leave less than a tenth of the disk free")
