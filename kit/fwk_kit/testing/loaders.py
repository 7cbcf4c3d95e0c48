"""What loaders of checkpoints, and sources of models, must do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import Checkpoint, Loader, LoaderContext, ModelSource
from fwk.plugins import Registered
from fwk_kit.testing.base import PluginSuite


class LoaderSuite(PluginSuite):
    """What is there is read, and what is not is refused by name.

    Override ``sample`` to make a checkpoint in the loader's format; without it only the refusals are tested.
    """

    family = "loaders"
    interface = Loader

    def sample(self, folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
        """Make a small checkpoint below ``folder``: its path, and the tensors it holds, by name."""
        return None

    def loader(self, item: Registered) -> Loader:
        """The loader."""
        return self.make(item, LoaderContext(self.given(item)))

    def opened(self, item: Registered, folder: Path) -> tuple[Path, Checkpoint, Mapping[str, Any]]:
        """The sample, opened; or a skip."""
        made = self.sample(folder)
        if made is None:
            pytest.skip("the suite has no checkpoint: override sample()")
        return made[0], self.loader(item).open(made[0]), made[1]

    def test_says_what_it_does_not_read(self, item: Registered, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "text.txt").write_text("hello")
        for path in (tmp_path / "empty", tmp_path / "text.txt", tmp_path / "missing"):
            why = type(self.loader(item)).reads(path)
            assert isinstance(why, str), f"reads() takes {path.name}"
            assert why
            with pytest.raises(ModelLoadError):
                self.loader(item).open(path)

    def test_reads_what_is_there(self, item: Registered, tmp_path: Path) -> None:
        import torch  # noqa: PLC0415 - loaders declare and refuse without it

        path, checkpoint, tensors = self.opened(item, tmp_path)
        assert type(self.loader(item)).reads(path) is None
        assert checkpoint.config()["architectures"]
        weights = checkpoint.weights()
        assert set(weights.names()) == set(tensors)
        for name, wanted in tensors.items():
            assert weights.has(name)
            found = weights.tensor(name, tuple(wanted.shape))
            torch.testing.assert_close(found.float(), wanted.float(), atol=0, rtol=0)
            halves = torch.full(wanted.shape, torch.nan, dtype=torch.bfloat16)
            weights.tensor_as(name, tuple(wanted.shape), torch.bfloat16, halves)
            for read in (halves, weights.tensor_as(name, tuple(wanted.shape), torch.bfloat16)):
                torch.testing.assert_close(read, found.bfloat16(), atol=0, rtol=0)

    def test_wrong_tensors_are_refused_by_name(self, item: Registered, tmp_path: Path) -> None:
        _, checkpoint, tensors = self.opened(item, tmp_path)
        weights, name = checkpoint.weights(), min(tensors)
        assert not weights.has("nobody.has.this")
        with pytest.raises(ModelLoadError, match=r"nobody\.has\.this"):
            weights.tensor("nobody.has.this", (1,))
        with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
            weights.tensor(name, (1, 2, 3))

    def test_a_file_cut_short_is_refused(self, item: Registered, tmp_path: Path) -> None:
        path, _, tensors = self.opened(item, tmp_path)
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        largest = max(files, key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        with pytest.raises(ModelLoadError):  # noqa: PT012 - it may be noticed when opening or when reading
            weights = self.loader(item).open(path).weights()
            for name, wanted in tensors.items():
                weights.tensor(name, tuple(wanted.shape))


class ModelSourceSuite(PluginSuite):
    """Known names lead to a path, others to nothing: the next source is asked.

    unknown: names it must not know. Override ``prepare`` to make a model the source knows.
    """

    family = "model_sources"
    interface = ModelSource
    unknown: ClassVar[Sequence[str]] = ("no such model, surely",)

    def prepare(self, folder: Path) -> str | None:
        """Make a model that the source finds, with the suite's options: its name."""
        return None

    def source(self, item: Registered) -> ModelSource:
        """The source."""
        return self.make(item, LoaderContext(self.given(item)))

    def test_unknown_names_are_unknown(self, item: Registered, tmp_path: Path) -> None:
        for name in self.unknown:
            assert self.source(item).fetch(name, None, tmp_path / "downloads", lambda line: None) is None, name

    def test_a_known_name_is_a_path(self, item: Registered, tmp_path: Path) -> None:
        name = self.prepare(tmp_path)
        if name is None:
            pytest.skip("the suite makes no model: override prepare()")
        found = self.source(item).fetch(name, None, tmp_path / "downloads", lambda line: None)
        assert found is not None
        assert found.exists()
