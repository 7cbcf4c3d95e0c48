"""Finds adapters below the folders of ``--lora-dirs``."""

from __future__ import annotations

from pathlib import Path

from fwk.errors import ConfigError, ModelLoadError
from fwk.interfaces.lora import AdapterWeights, LoRASource, LoRASourceContext
from fwk_lora._common import peft


class LocalAdapters(LoRASource):
    """Adapters in local folders."""

    def __init__(self, context: LoRASourceContext) -> None:
        super().__init__(context)
        self._max_bytes: int = context.options.max_lora_model_size
        self._folders = [_real_folder(name) for name in context.options.lora_dirs]

    @property
    def is_open(self) -> bool:
        return bool(self._folders)

    def find(self, name: str) -> Path | None:
        """A folder below one of ours: where it really lies, and its files too, once every link has been followed."""
        if not name or "\0" in name or ".." in Path(name).parts:
            return None
        for folder in self._folders:
            try:
                found = (folder / name).resolve(strict=True)  # a whole path replaces the folder
                real = [found, *((found / file).resolve() for file in (peft.CONFIG, peft.WEIGHTS))]
                if found.is_dir() and all(_is_below(path, folder) for path in real):
                    return found
            except (OSError, RuntimeError):  # not there, not ours to read, or links in a circle
                continue
        return None

    def open(self, path: Path) -> AdapterWeights | None:
        file = path / peft.WEIGHTS
        if self._max_bytes >= 0 and file.is_file() and file.stat().st_size > self._max_bytes:
            raise ModelLoadError(
                f"{peft.WEIGHTS} has {file.stat().st_size} bytes, more than --max-lora-model-size {self._max_bytes}"
            )
        return peft.read(path)


def _is_below(path: Path, folder: Path) -> bool:
    return path != folder and path.is_relative_to(folder)


def _real_folder(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_dir():
        raise ConfigError(f"--lora-dirs: {name} is not a folder")
    return path.resolve()
