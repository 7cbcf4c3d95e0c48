"""What layers compute, as a running server writes it, held against transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lazy import lazy
from tests.helpers.rig import Server
from tests.helpers.servers import Begin

transformers = lazy("transformers")

PROMPT = [11, 12, 13, 40, 41]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_checkpoint(folder, "llama")


def serve(begin: Begin, model: Path, folder: Path, *flags: str) -> Server:
    words = ("--load-format", "safetensors", "--dtype", "float32", "--debug-tensor-dump-output-folder", str(folder))
    flags = flags if "--debug-tensor-dump-max-steps" in flags else ("--debug-tensor-dump-max-steps", "100000", *flags)
    return begin(model, *words, *flags)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-3, atol=2e-3)


def test_layers_compute_what_transformers_does(
    checkpoint: tuple[Path, transformers.PreTrainedModel], begin: Begin, tmp_path: Path
) -> None:
    path, reference = checkpoint
    server = serve(begin, path, tmp_path)
    assert "observers.tensor_dump reads what layers compute" in server.get("/server_info").json()["chosen"]["step"]
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"logprobs": 1}  # so that every logit is computed
    before = set((tmp_path / "replica0-rank0").iterdir())  # of requests that the server was started with
    chosen = server.post(body).json()["choices"][0]["token_ids"]
    files = sorted(set((tmp_path / "replica0-rank0").iterdir()) - before)
    assert len(files) == 3
    assert all(file.stat().st_mode & 0o77 == 0 for file in files)
    known = list(PROMPT)
    for file, token in zip(files, chosen, strict=True):
        step = load_file(file)
        num_new = len(step["token_ids"])
        assert step["token_ids"].tolist() == known[-num_new:]
        assert step["positions"].tolist() == list(range(len(known) - num_new, len(known)))
        with torch.no_grad():
            expected = reference(torch.tensor([known]), output_hidden_states=True)
        states = [state[0, -num_new:] for state in expected.hidden_states]
        close(step["embedding"], states[0])
        for index in range(reference.config.num_hidden_layers - 1):  # the last one's last rows are all there are
            close(step[f"layers.{index}.0"] + step[f"layers.{index}.1"], states[index + 1])
        close(step["hidden"][-1], states[-1][-1])
        close(step["logits"][-1], expected.logits[0, -1])
        known.append(token)


@pytest.mark.sweep
def test_only_what_is_wanted_is_written(
    checkpoint: tuple[Path, transformers.PreTrainedModel], begin: Begin, tmp_path: Path
) -> None:
    path, _ = checkpoint
    layers = ("--debug-tensor-dump-layers", "1", "layers.*.mlp", "--debug-tensor-dump-max-steps", "2")
    server = serve(begin, path, tmp_path, *layers, "--tensor-parallel-size", "2")
    assert server.post({"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}).status_code == 200
    for rank in range(2):
        files = sorted((tmp_path / f"replica0-rank{rank}").iterdir())
        assert len(files) == 2
        names = set(load_file(files[0]))
        assert {"layers.0.mlp", "layers.1.mlp", "layers.1.attention.output", "token_ids"} <= names
        assert "layers.0.attention.output" not in names


@pytest.mark.sweep
def test_a_layer_that_is_not_there_is_refused(
    checkpoint: tuple[Path, transformers.PreTrainedModel], begin: Begin, tmp_path: Path
) -> None:
    path, _ = checkpoint
    with pytest.raises(AssertionError, match=r"no layer is called so; there are embedding, layers\.0"):
        serve(begin, path, tmp_path, "--debug-tensor-dump-layers", "layers.99.*")
