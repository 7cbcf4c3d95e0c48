"""``fwk pull``, ``fwk list`` and ``fwk rm``: models kept on this machine."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fwk.cli.common import note, read_options
from fwk.cli.option_parsing import Parser
from fwk.config import Config
from fwk.errors import ConfigError
from fwk.setup.checkpoint import default_download_dir, locate

HUB = "hub"
PREFIX = "models--"
"""How huggingface_hub names a repository's folder: models--OWNER--NAME."""


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A fetched model, by the name it is served by."""

    name: str
    folder: Path

    @property
    def num_bytes(self) -> int:
        """What its files take; links to another file of it count once."""
        return sum(path.lstat().st_size for path in self.folder.rglob("*") if not path.is_dir())


def folder_of(config: Config) -> Path:
    """Where models are kept."""
    return Path(config.model.download_dir).expanduser() if config.model.download_dir else default_download_dir()


def kept(folder: Path) -> Iterator[KeptModel]:
    """All models in ``folder``, by name."""
    found = [KeptModel(path.name, path) for path in _folders(folder) if path.name != HUB]
    for path in _folders(folder / HUB):
        if path.name.startswith(PREFIX):
            found.append(KeptModel(path.name.removeprefix(PREFIX).replace("--", "/", 1), path))
    yield from sorted(found, key=lambda model: model.name)


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def size(num_bytes: float) -> str:
    """In MiB or GiB, as people read it."""
    mebibytes = num_bytes / 2**20
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1000 else f"{mebibytes:.0f} MiB"


def pull(argv: Sequence[str]) -> int:
    """Fetch a model, and print where it is."""
    parser = Parser("fwk pull", description="Fetch a model and keep it; fwk serve finds it there.", allow_abbrev=False)
    parser.add_argument("bare_model", nargs="?", metavar="MODEL", help="none: the default one")
    plugins, config, _ = read_options(parser, argv)
    print(locate(config, plugins, note))
    return 0


def list_models(argv: Sequence[str]) -> int:
    """Print the models that are kept, with what they take."""
    parser = Parser("fwk list", description="The models that are kept on this machine.", allow_abbrev=False)
    _, config, _ = read_options(parser, argv)
    models = list(kept(folder_of(config)))
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        print(f"{model.name:{width}}  {size(model.num_bytes):>9}")
    noun = "model" if len(models) == 1 else "models"
    note(f"{len(models)} {noun}, {size(sum(model.num_bytes for model in models))}, in {folder_of(config)}")
    return 0


def remove(argv: Sequence[str]) -> int:
    """Delete models that are kept. One that is served meanwhile is served on."""
    parser = Parser("fwk rm", description="Delete models that are kept on this machine.", allow_abbrev=False)
    parser.add_argument("names", nargs="+", metavar="MODEL", help="as fwk list shows it")
    _, config, arguments = read_options(parser, argv)
    models = {model.name: model for model in kept(folder_of(config))}
    for name in arguments.names:
        if name not in models:
            near = difflib.get_close_matches(name, models, 1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise ConfigError(f"no model '{name}' is kept in {folder_of(config)}{hint}: fwk list shows those that are")
    for name in dict.fromkeys(arguments.names):
        num_bytes = models[name].num_bytes
        if not os.access(models[name].folder.parent, os.W_OK):
            raise ConfigError(
                f"{models[name].folder} cannot be deleted: {models[name].folder.parent} is not ours to write"
            )
        shutil.rmtree(models[name].folder)
        note(f"deleted {name}: {size(num_bytes)}")
    return 0
