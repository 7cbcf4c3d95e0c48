"""``--weights-cache``: the second start maps what the first packed, and computes the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import checkpoint_maker
from tests.helpers.quantised import checkpoint_twins, gguf_twins
from tests.helpers.tiny import save_llama

import fwk
import fwk_layers
from fwk.errors import ConfigError
from fwk.interfaces.feature import ModelBuild
from fwk.interfaces.loader import WeightSource
from fwk.interfaces.weights_cache import PackedTensors
from fwk.worker.loading.weights import TrackedWeights
from fwk_features.weights_cache.worker import FileCache
from fwk_native.cache import folder as native_folder
from fwk_native.thread_pool import ThreadPool
from fwk_quant._linear_cpu.packed import layout_version

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "int4_group_size": 32},
}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_llama(tmp_path / "model", tie_word_embeddings=request.param)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of matrices that were read from checkpoints."""
    names: list[str] = []
    for method in ("tensor_as", "tensor", "raw"):
        original = getattr(TrackedWeights, method)

        def noting(self: WeightSource, name: str, *args: Any, original: Callable[..., Any] = original) -> torch.Tensor:
            found: torch.Tensor = original(self, name, *args)
            if found.dim() > 1:
                names.append(name)
            return found

        monkeypatch.setattr(TrackedWeights, method, noting)
    return names


def tokens(model: Path, folder: Path | str, **options: Any) -> list[int]:
    with fwk.LLM(str(model), weights_cache=str(folder), max_total_tokens=256, **options) as llm:
        sampling = fwk.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        return llm.generate([PROMPT], sampling)[0].token_ids


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", list(FORMATS))
def test_second_start_reads_no_matrix(model: Path, tmp_path: Path, read: list[str], name: str) -> None:
    folder, options = tmp_path / "cache", FORMATS[name]
    expected = tokens(model, "none", **options)
    read.clear()
    assert tokens(model, folder, **options) == expected
    assert len(read) > 10
    assert len(files(folder)) == 1
    read.clear()
    assert tokens(model, folder, **options) == expected
    # A plain embedding that need not be converted is the checkpoint's own memory.
    assert set(read) <= {"model.embed_tokens.weight"}
    assert len(files(folder)) == 1


def test_blocks_of_gguf(tmp_path: Path, read: list[str]) -> None:
    twins = gguf_twins("Q8_0", tmp_path)
    folder, options = tmp_path / "cache", {"dtype": "bfloat16", "quantization": "gguf"}
    expected = tokens(twins.path, "none", **options)
    assert tokens(twins.path, folder, **options) == expected
    read.clear()
    assert tokens(twins.path, folder, **options) == expected
    assert not read


def test_reordered_inputs(tmp_path: Path, read: list[str]) -> None:
    """GPTQ's ``desc_act``: the order of the inputs is kept with what was packed."""
    twins = checkpoint_twins("int4-gptq-act-order", tmp_path)
    folder, options = tmp_path / "cache", {"dtype": "bfloat16"}
    expected = tokens(twins.path, "none", **options)
    assert tokens(twins.path, folder, **options) == expected
    read.clear()
    assert tokens(twins.path, folder, **options) == expected
    assert set(read) <= {"model.embed_tokens.weight", "lm_head.weight"}


def test_experts(tmp_path: Path, read: list[str]) -> None:
    path = checkpoint_maker(tmp_path)("qwen3_moe")
    expected = tokens(path, "none", dtype="bfloat16")
    folder = tmp_path / "cache"
    assert tokens(path, folder, dtype="bfloat16") == expected
    read.clear()
    assert tokens(path, folder, dtype="bfloat16") == expected
    assert set(read) <= {"model.embed_tokens.weight"}


def packed_model(tmp_path: Path) -> tuple[Path, Path, Path, list[int]]:
    """A model, a folder, the file there that an earlier start made, and the tokens."""
    model, folder = save_llama(tmp_path / "model"), tmp_path / "cache"
    found = tokens(model, folder)
    (file,) = files(folder)
    return model, folder, file, found


@pytest.mark.parametrize("part", [0.3, 1 - 1e-9])
def test_a_damaged_file_is_made_again(tmp_path: Path, part: float, caplog: pytest.LogCaptureFixture) -> None:
    model, folder, file, expected = packed_model(tmp_path)
    whole = file.read_bytes()
    place = int(len(whole) * part)
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert tokens(model, folder) == expected
    assert "is damaged" in caplog.text or "truncated" in caplog.text
    assert file.read_bytes() == whole


def test_layers_of_another_version_make_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, folder = tmp_path / "fwk_layers", tmp_path / "cache"
    folder.mkdir()
    build = ModelBuild("served", path=tmp_path / "model", threads=ThreadPool(), identity=lambda: "the same")

    def found() -> bool:
        cache = FileCache(folder, build, lambda name: None, 0, 2**30)
        is_found = cache.find("layer") is not None
        cache.store("layer", lambda: PackedTensors({"matrix": torch.ones(8)}))
        cache.finish()
        cache.close()
        return is_found

    assert not found()
    shutil.copytree(Path(fwk_layers.__file__).parent, copy)
    monkeypatch.setattr(fwk_layers, "__file__", str(copy / "__init__.py"))
    assert found(), "the same code elsewhere"
    with (copy / "linear.py").open("a") as code:
        code.write("# another way to pack\n")
    assert not found()
    assert len(files(folder)) == 2


def test_a_truncated_file_is_made_again(tmp_path: Path) -> None:
    model, folder, file, expected = packed_model(tmp_path)
    whole = file.read_bytes()
    os.truncate(file, len(whole) // 2)
    assert tokens(model, folder) == expected
    assert file.read_bytes() == whole


def test_another_source_of_the_same_size_and_time(tmp_path: Path) -> None:
    model, folder, _, before = packed_model(tmp_path)
    weights = model / "model.safetensors"
    status, size = weights.stat(), weights.stat().st_size
    tensors = load_file(weights)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = -tensors[name].clone()
    save_file(tensors, weights, {"format": "pt"})
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_size == size
    expected = tokens(model, "none")
    assert expected != before
    assert tokens(model, folder) == expected
    assert len(files(folder)) == 2


@pytest.mark.sweep
def test_another_cpu_makes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder, file, expected = packed_model(tmp_path)
    monkeypatch.setenv("FWK_CPU_ISA", "plain")
    layout_version.cache_clear()
    assert tokens(model, folder) == expected
    (other,) = set(files(folder)) - {file}
    shutil.copy(file, other)  # under the name of this CPU's
    assert tokens(model, folder) == expected
    assert other.read_bytes() != file.read_bytes()
    layout_version.cache_clear()


def test_another_version_of_the_kernels_is_packed_again(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder, file, expected = packed_model(tmp_path)
    before = file.read_bytes()
    monkeypatch.setattr("fwk_quant.none.method.layout_version", lambda: "another")
    read.clear()
    assert tokens(model, folder) == expected
    assert len(read) > 10
    assert files(folder) == [file]
    assert file.read_bytes() != before


@pytest.mark.sweep
def test_options_of_formats_are_told_apart(tmp_path: Path) -> None:
    model, folder = save_llama(tmp_path / "model"), tmp_path / "cache"
    for options in FORMATS.values():
        expected = tokens(model, "none", **options)
        assert tokens(model, folder, **options) == expected
        assert tokens(model, folder, **options) == expected
    assert len(files(folder)) == len(FORMATS)


KILLED = f"""
import os, sys
from pathlib import Path
import {__name__} as it
from fwk_features.weights_cache.unfinished import UnfinishedFile
add, left = UnfinishedFile.add, [int(sys.argv[3])]
def counting(self, name, entry):
    add(self, name, entry)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), 9)
UnfinishedFile.add = counting
it.tokens(Path(sys.argv[1]), sys.argv[2], **it.FORMATS["int8"])
"""


def test_a_start_that_is_killed_packs_no_layer_twice(tmp_path: Path, read: list[str]) -> None:
    """Of 8 layers with weights and a head, those that were written are found by the next start, and only these."""
    model, folder = save_llama(tmp_path / "model", tie_word_embeddings=False), tmp_path / "kept"
    expected = tokens(model, "none", **FORMATS["int8"])
    whole = len(read)
    command = [sys.executable, "-c", KILLED, str(model), str(folder), "5"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], check=False, capture_output=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert [file.name.endswith(".weights.tmp") for file in files(folder)] == [True]
    read.clear()
    assert tokens(model, folder, **FORMATS["int8"]) == expected
    merged = {"qkv": 3, "gate_up": 2}  # matrices of a layer
    assert whole - len(read) >= 5 + sum(merged.values()) - len(merged), (whole, read)
    assert len(read) > 1
    assert [file.name.endswith(".weights") for file in files(folder)] == [True]
    read.clear()
    assert tokens(model, folder, **FORMATS["int8"]) == expected
    assert set(read) <= {"model.embed_tokens.weight"}


@pytest.mark.sweep
def test_two_that_start_at_once_make_one_file(tmp_path: Path, read: list[str]) -> None:
    model, folder = save_llama(tmp_path / "model"), tmp_path / "kept"
    code = f"import {__name__} as it; print(it.tokens({str(model)!r}, {str(folder)!r}, **it.FORMATS['int8']))"
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", f"from pathlib import Path; {code}"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].splitlines()[-1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1]
    assert len(files(folder)) == 1
    assert str(tokens(model, folder, **FORMATS["int8"])) == said[0]
    assert read == []


def test_the_folder_is_held_below_its_size(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    models = [save_llama(tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b", "c"))]
    tokens(models[0], folder)
    size = files(folder)[0].stat().st_size
    for model in models[1:]:
        tokens(model, folder, weights_cache_size=2.5 * size / 2**30)
    assert [file.name.partition("-")[0] for file in files(folder)] == ["b", "c"]
    tokens(models[0], folder, weights_cache_size=0.5 * size / 2**30)
    assert len(files(folder)) == 2


def test_small_models_are_not_kept_unless_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "user"
    cache.mkdir()
    (cache / "fwk").mkdir()
    (cache / "fwk" / "native").symlink_to(native_folder())
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    tokens(save_llama(tmp_path / "model"), "auto")
    assert not files(cache / "fwk" / "weights")


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        tokens(save_llama(tmp_path / "model"), folder)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"--weights-cache .* is not a folder"):
        tokens(save_llama(tmp_path / "model"), tmp_path / "cache")
