"""The GGUF loader: everything a model needs from one file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import Checkpoint, Loader, WeightSource, WeightsSummary
from fwk_files.regular import open_regular
from fwk_loaders._common.json_file import read_json
from fwk_loaders._common.templates import WITH_TOOLS, joined
from fwk_loaders.gguf.config import architecture_of, read_config, read_generation_config
from fwk_loaders.gguf.keys import check_keys
from fwk_loaders.gguf.metadata import Metadata
from fwk_loaders.gguf.reader import MAGIC, GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class GGUFLoader(Loader):
    """Opens a .gguf file, or a folder that holds exactly one."""

    @classmethod
    def reads(cls, path: Path) -> str | None:
        """None for a file that starts with ``GGUF``, and for a folder with one .gguf file and no config.json."""
        try:
            if path.is_dir():
                if (path / "config.json").exists():
                    return "reads folders without config.json only"
                found = _files_in(path)
                return None if len(found) == 1 else f"needs exactly one .gguf file in the folder, found {len(found)}"
            with open_regular(path) as file:
                return None if file.read(4) == MAGIC else "needs a file that starts with 'GGUF'"
        except OSError as error:
            return f"cannot read {path}: {error.strerror}"

    def open(self, path: Path) -> Checkpoint:
        """Read the header; weights and token lists stay in the file until they are asked for."""
        if path.is_dir():
            found = _files_in(path)
            if len(found) != 1:
                names = ", ".join(file.name for file in found) or "none"
                raise ModelLoadError(f"{path}: which .gguf file? Found: {names}; give the path of one")
            path = found[0]
        return GGUFCheckpoint(path)


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() == ".gguf" and file.is_file())


class GGUFCheckpoint(Checkpoint):
    """One opened file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata = Metadata(GGUFFile(path))
        self._architecture = architecture_of(self._metadata)

    @cached_property
    def _config(self) -> dict[str, Any]:
        config = read_config(self._metadata)
        check_keys(self._metadata, config)
        return config

    def config(self) -> Mapping[str, Any]:
        """config.json, from the metadata."""
        return self._config

    @cached_property
    def _generation_config(self) -> dict[str, Any]:
        path = self.path.with_name("generation_config.json")
        given = read_json(path) if path.exists() else {}
        return {**given, **read_generation_config(self._metadata)}

    def generation_config(self) -> Mapping[str, Any]:
        """The ids that end an answer, and what a generation_config.json next to the file says of sampling."""
        return self._generation_config

    def tokenizer(self) -> Tokenizer:
        """The tokeniser, from the token lists. Raises ``ModelLoadError`` for kinds that are not known."""
        from fwk_loaders.gguf.tokenizer import build_tokenizer  # noqa: PLC0415 - imports tokenizers

        return build_tokenizer(self._metadata)

    def tokenizer_config(self) -> Mapping[str, Any]:
        """The texts of the special tokens, and whether bos and eos are added."""
        from fwk_loaders.gguf.tokenizer import read_tokenizer_config  # noqa: PLC0415 - imports tokenizers

        return read_tokenizer_config(self._metadata)

    def chat_template(self) -> str | None:
        """The Jinja source, when the file has one; with the one for tools, when it has two."""
        default, more = (self._metadata.string(f"tokenizer.chat_template{name}", "") for name in ("", f".{WITH_TOOLS}"))
        return joined(default, more or None) if default else None

    def weights_summary(self) -> WeightsSummary:
        """From the header."""
        bytes_of = Counter[str]()
        for tensor in self._metadata.file.tensors.values():
            bytes_of[tensor.type.name] += tensor.num_bytes
        [(precision, _)] = bytes_of.most_common(1)
        num_parameters = sum(prod(tensor.shape) for tensor in self._metadata.file.tensors.values())
        return WeightsSummary("gguf", precision, num_parameters, self.path.stat().st_size)

    def weights(self) -> WeightSource:
        """The tensors, de-quantised one by one."""
        from fwk_loaders.gguf.converted import ConvertedWeights  # noqa: PLC0415 - imports torch
        from fwk_loaders.gguf.weights import GGUFWeights, LatentWeights  # noqa: PLC0415 - imports torch

        if self._architecture.conversions:
            return ConvertedWeights(self._metadata.file, self._architecture, self._config)
        source = LatentWeights if self._architecture.is_latent else GGUFWeights
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        return source(self._metadata.file, self._architecture, heads, kv_heads)
