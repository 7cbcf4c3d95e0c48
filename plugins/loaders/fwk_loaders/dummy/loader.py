"""A checkpoint that is only a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import Checkpoint, Loader, WeightSource
from fwk_loaders._common import FolderCheckpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer


Normalised = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""``LoaderContext.normalised``."""


class DummyLoader(Loader):
    """Opens a folder with a config.json, or the config.json itself."""

    @classmethod
    def reads(cls, path: Path) -> str | None:
        """Weights need not be there."""
        return None if (_folder(path) / "config.json").is_file() else "needs a folder with a config.json"

    def open(self, path: Path) -> Checkpoint:
        """Raises ``ModelLoadError`` when there is no config.json."""
        why = self.reads(path)
        if why is not None:
            raise ModelLoadError(f"{path}: the dummy loader {why}")
        return DummyCheckpoint(_folder(path), self.context.normalised)


def _folder(path: Path) -> Path:
    return path.parent if path.name == "config.json" and not path.is_dir() else path


class DummyCheckpoint(FolderCheckpoint):
    """Tokeniser and templates are the folder's own; without a tokenizer.json they are the byte tokeniser's."""

    def __init__(
        self, path: Path, normalised: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict[str, Any]
    ) -> None:
        super().__init__(path)
        self._normalised = normalised
        self._has_tokenizer = self._folder.has_tokenizer()

    @cached_property
    def _decoder(self) -> Mapping[str, Any]:
        """The config with the language model's fields at the top, wherever the file has them."""
        return self._normalised(self._config)

    def processor_config(self) -> Mapping[str, Any]:
        """The folder's."""
        return self._folder.processor_config()

    def generation_config(self) -> Mapping[str, Any]:
        """The folder's; else the byte tokeniser's end of turn, unless config.json has an ``eos_token_id``."""
        found = self._folder.generation_config()
        if self._has_tokenizer or found.get("eos_token_id", self._decoder.get("eos_token_id")) is not None:
            return found
        from fwk_loaders.dummy.tokenizer import END_ID  # noqa: PLC0415 - imports tokenizers

        return {**found, "eos_token_id": END_ID}

    def tokenizer(self) -> Tokenizer:
        """The folder's, or one token per byte."""
        if self._has_tokenizer:
            return self._folder.tokenizer()
        from fwk_loaders.dummy.tokenizer import build_tokenizer  # noqa: PLC0415 - imports tokenizers

        return build_tokenizer(self._decoder.get("vocab_size"), str(self.path / "config.json"))

    def tokenizer_config(self) -> Mapping[str, Any]:
        """The folder's, or the byte tokeniser's."""
        if self._has_tokenizer:
            return self._folder.tokenizer_config()
        from fwk_loaders.dummy.tokenizer import TOKENIZER_CONFIG  # noqa: PLC0415 - imports tokenizers

        return {**TOKENIZER_CONFIG, **self._folder.tokenizer_config()}

    def chat_template(self) -> str | None:
        """The folder's, or a plain ChatML for the byte tokeniser."""
        found = self._folder.chat_template()
        if found is not None or self._has_tokenizer:
            return found
        from fwk_loaders.dummy.tokenizer import CHAT_TEMPLATE  # noqa: PLC0415 - imports tokenizers

        return CHAT_TEMPLATE

    def weights(self) -> WeightSource:
        """Random tensors."""
        from fwk_loaders.dummy.weights import DummyWeights  # noqa: PLC0415 - imports torch

        return DummyWeights(self._decoder)
