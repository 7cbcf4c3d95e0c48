"""The safetensors loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import Checkpoint, Loader, StoredTensor, WeightSource
from fwk_loaders._common import FolderCheckpoint, read_json
from fwk_loaders.safetensors.stored import stored_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_PICKLE_SENTENCE = (
    "holds weights as Python pickles only, which can run code and are never opened: convert them to safetensors, for "
    "example with transformers: AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
)


class SafetensorsLoader(Loader):
    """Opens a folder with config.json and model.safetensors, or the index of several files."""

    @classmethod
    def reads(cls, path: Path) -> str | None:
        """Looks at names only."""
        if not path.is_dir():
            return "needs a folder"
        if not (path / "config.json").exists():
            return "needs a folder with a config.json"
        return _refusal(path)

    def open(self, path: Path) -> Checkpoint:
        """Check that every file is there; nothing of the weights is read."""
        why = self.reads(path)
        if why is not None:
            raise ModelLoadError(f"{path}: the safetensors loader {why}")
        return SafetensorsCheckpoint(path)


def _refusal(folder: Path) -> str | None:
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return None
    try:
        names = sorted(item.name for item in folder.iterdir())
    except OSError as error:
        return f"cannot list the folder: {error.strerror}"
    if any(name.endswith(".safetensors") for name in names):
        return f"needs {SINGLE} or {INDEX}; the folder has .safetensors files, but no index: fetch it again"
    if any(name.endswith(_PICKLES) for name in names):
        return f"cannot read this folder: it {_PICKLE_SENTENCE}"
    return f"needs {SINGLE} or {INDEX}"


class SafetensorsCheckpoint(FolderCheckpoint):
    """One opened folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = _files(path)

    def weights(self) -> WeightSource:
        """The tensors. Opens every file and checks its header."""
        from fwk_loaders.safetensors.weights import SafetensorsWeights  # noqa: PLC0415 - imports torch

        return SafetensorsWeights(self.path, self._files, self._quantization)

    def weight_files(self) -> Sequence[Path]:
        """The .safetensors files."""
        return tuple(self._files)

    def stored_tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors."""
        return stored_tensors(self._files)


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """The files with weights, and the tensors the index promises in each (None: no index, the file says it)."""
    if (folder / SINGLE).exists():
        return {folder / SINGLE: None}
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: 'weight_map' must be an object of tensor names and files; fetch it again")
    by_name: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise ModelLoadError(f"{index}: tensor {tensor!r}: the file must be a name, not {name!r}")
        by_name.setdefault(name, []).append(tensor)
    return {_member(folder, index, name): tensors for name, tensors in by_name.items()}


def _member(folder: Path, index: Path, name: str) -> Path:
    """The path of a file the index names. It must lie in the folder: the index is not trusted.

    Hub caches keep ``snapshots/REVISION/FILE`` as links into ``blobs`` next to ``snapshots``; these are followed too.
    """
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or pure.suffix != ".safetensors":
        raise ModelLoadError(f"{index}: {name!r} is not the name of a .safetensors file in this folder")
    path = folder / pure
    home = folder.resolve()
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    try:
        real = path.resolve()
        is_there = real.is_file()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if not any(real.is_relative_to(root) for root in allowed):
        raise ModelLoadError(f"{path}: links to {real}, outside the model's folder; copy the file into the folder")
    if not is_there:
        raise ModelLoadError(f"{path}: missing, but {index.name} names it; fetch the model again")
    return path
