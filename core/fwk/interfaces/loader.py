"""Where weights come from: sources find a model, loaders read it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration
from fwk.interfaces.pooling import PoolingConfig

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor


class WeightSource(ABC):
    """Named tensors of a checkpoint, read lazily, under their Hugging Face names."""

    @abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read one tensor of ``shape``, on the CPU, in the checkpoint's own dtype (packed formats come de-quantised).

        Raises ``ModelLoadError`` naming file and tensor when it is missing, damaged, or not of ``shape``, and when it
        is quantised in a way that only ``raw`` can read.
        """

    def tensor_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """What ``tensor`` reads, rounded to ``dtype`` as torch does it, and in the memory of ``out`` if that is given.

        out: contiguous, of that shape and type. Override it to de-quantise without a tensor in between.
        """
        found = self.tensor(name, shape)
        return found.to(dtype) if out is None else out.copy_(found)

    def tensor_on(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """What ``tensor`` reads, of ``shape``, on a device that is not the host, which rounds and joins it there.

        Override it where the numbers need not come from the host's memory.
        """
        return self.tensor(name, shape).to(device)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""

    @abstractmethod
    def names(self) -> Iterable[str]:
        """All tensors, to find those no layer asked for."""

    def skip(self, name: str) -> None:
        """Say that a tensor is knowingly left out: it is there for something this run does not do."""

    def stored_sizes(self) -> Mapping[str, tuple[int, int]]:
        """By layout (``layouts``): how many numbers tensors of it hold, and in how many bytes. Empty: not known."""
        return {}

    def is_mapped(self, name: str, dtype: torch.dtype) -> bool:
        """Whether ``tensor_as`` gives memory of the file's own, which costs nothing before it is used."""
        return False

    def release(self, names: Iterable[str]) -> None:
        """Let what was read of these leave memory, where it is the file's: what is used again comes back from there."""

    def layouts(self, prefix: str) -> tuple[str, ...]:
        """How the weights below ``prefix`` can be read, the form they are stored in first.

        ``plain`` is floating-point numbers through ``tensor``; any other name is a layout a quantiser declares, read
        through ``raw``. With an empty prefix: all layouts of the checkpoint's quantised layers, and ``plain`` if every
        layer can be read so.
        """
        return ("plain",)

    def raw(self, name: str) -> Tensor:
        """The tensor as stored, for a quantiser that reads its layout itself: of any shape and type."""
        raise NotImplementedError(f"{type(self).__name__} has no packed form of {name}")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a run of bytes of a file, little-endian and in the order of its last dimension.

    dtype: as safetensors writes it (``BF16``, ``F8_E4M3``, ``I32``, ...).

    - ``path``: the file.
    - ``start``: offset of its first byte in the file.
    - ``num_bytes``: of the run.
    - ``shape``: outermost dimension first.
    """

    path: Path
    start: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightsSummary:
    """What is told of a model's weights: of all tensors their parameters, of most of their bytes the precision.

    format: of the files, as ``safetensors``; precision: as the format writes it (``BF16``, ``Q4_K``). Empty: unknown.

    - ``num_parameters``: numbers in all tensors.
    - ``num_bytes``: of the files.
    """

    format: str = ""
    precision: str = ""
    num_parameters: int = 0
    num_bytes: int = 0


class Checkpoint(ABC):
    """An opened model: everything but the weights is light to read and needs no torch.

    - ``path``: the folder or file that was opened.
    """

    path: Path

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """A Hugging Face style config.json."""

    def generation_config(self) -> Mapping[str, Any]:
        """Defaults for sampling and stopping (generation_config.json); empty when there are none."""
        return {}

    def processor_config(self) -> Mapping[str, Any]:
        """How media become what the model encodes: preprocessor_config.json and processor_config.json as one.

        Empty when there is neither. What is nested there by the part that reads it (``image_processor``) is not here.
        """
        return {}

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokeniser. Raises ``ModelLoadError`` naming the file when there is none or it is damaged."""

    @abstractmethod
    def tokenizer_config(self) -> Mapping[str, Any]:
        """tokenizer_config.json: bos_token, eos_token, add_bos_token, ...; empty when there is none."""

    @abstractmethod
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template."""

    def pooling(self) -> PoolingConfig | None:
        """How hidden states become an embedding, where the model says so (modules.json); None when it does not.

        Raises ``ModelLoadError`` when it says something no runner here does.
        """
        return None

    @abstractmethod
    def weights(self) -> WeightSource:
        """The tensors. Imports torch."""

    def weight_files(self) -> Sequence[Path]:
        """The files that hold ``stored_tensors``; empty where tensors are no runs of bytes in files. Opens none."""
        return ()

    def stored_tensors(self) -> Mapping[str, StoredTensor]:
        """Where the bytes of each tensor lie in ``weight_files``. Reads their headers, and imports no torch.

        Raises ``ModelLoadError`` for a damaged file.
        """
        return {}

    def weights_summary(self) -> WeightsSummary:
        """A summary for people, read from the files' headers. Raises ``OSError`` or ``ModelLoadError``."""
        tensors = self.stored_tensors().values()
        bytes_of = Counter[str]()
        for tensor in tensors:
            bytes_of[tensor.dtype] += tensor.num_bytes
        [(precision, _)] = bytes_of.most_common(1) or [("", 0)]
        num_bytes = sum(path.stat().st_size for path in self.weight_files())
        files = {path.suffix.removeprefix(".") for path in self.weight_files()}
        num_parameters = sum(prod(tensor.shape) for tensor in tensors)
        return WeightsSummary(min(files, default=""), precision, num_parameters, num_bytes)

    def weights_identity(self) -> str:
        """What tells these weights from all others, where they are not in files below ``path``; empty: the files do.

        It stands for whatever in the loader's options decides what the weights are.
        """
        return ""


@dataclass(frozen=True, slots=True)
class LoaderContext:
    """What a loader is built with.

    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``normalised``: a config.json as the plugin that serves its architecture reads it (``ModelSpec.normalised``):
      with the language model's fields at the top. As it is where none serves it.
    """

    options: Any = None
    normalised: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict[str, Any]


class Loader(ABC):
    """Reads one file format."""

    def __init__(self, context: LoaderContext) -> None:
        self.context = context

    @classmethod
    @abstractmethod
    def reads(cls, path: Path) -> str | None:
        """None when this loader reads what is at ``path``, else why not, in a few words. Opens no large file."""

    @abstractmethod
    def open(self, path: Path) -> Checkpoint:
        """Open a folder or file. Raises ``ModelLoadError``."""


@dataclass(frozen=True, kw_only=True)
class LoaderSpec(Declaration):
    """Declares a loader (``--load-format``). ``auto`` asks ``reads`` in order of rank.

    is_automatic: whether ``auto`` may take it.
    """

    family: ClassVar[str] = "loaders"

    is_automatic: bool = True


Progress = Callable[[str], None]
"""Told what a long fetch is doing, in lines for a person."""


class ModelSource(ABC):
    """Turns what the user typed into a local path."""

    def __init__(self, context: LoaderContext) -> None:
        self.context = context

    @abstractmethod
    def fetch(self, name: str, revision: str | None, download_dir: Path, progress: Progress) -> Path | None:
        """Local path of the model, fetched if need be; None when this source does not know ``name``.

        Raises ``ModelLoadError`` when it knows the model but cannot get it; says how to work offline.
        """


@dataclass(frozen=True, kw_only=True)
class ModelSourceSpec(Declaration):
    """Declares a model source; all are asked in order of rank."""

    family: ClassVar[str] = "model_sources"
