"""``fwk train-draft``: what it trains is what the server runs, and it pays for texts it has seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.tiny import save_llama

import fwk
from fwk import SamplingParams
from fwk.cli.main import main
from fwk_kit.training.collect import Target
from fwk_kit.training.eagle3 import Eagle3

PROMPTS = ["one two three", "a b c d e f", "the sun the moon", "0 1 2 3 4 5 6 7", "x y z", "red green blue"]
ENGINE: dict[str, Any] = {"max_total_tokens": 4096, "max_running_requests": 8, "dtype": "float32"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=6)


def train(target: Path, folder: Path, *more: str) -> int:
    data = folder.parent / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    words = ["train-draft", str(target), "--out", str(folder), "--data", str(data), "--samples", "1"]
    return main([*words, "--max-tokens", "40", "--dtype", "float32", *more])


@pytest.mark.sweep
def test_a_trained_head_drafts_what_it_has_seen(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "head"
    assert train(target, folder, "--epochs", "300") == 0
    assert not (folder / "training.pt").exists()
    said = capsys.readouterr()
    assert "epoch 300 of 300" in said.out + said.err
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    with fwk.LLM(str(target), **ENGINE) as llm:
        wanted = [done.token_ids for done in llm.generate(PROMPTS, sampling)]
    options = {"speculative_algorithm": "eagle3", "speculative_draft_model_path": str(folder)}
    with fwk.LLM(str(target), **ENGINE, **options, speculative_num_steps=3) as llm:
        assert [done.token_ids for done in llm.generate(PROMPTS, sampling)] == wanted
        stats = llm.engine.stats()
    assert stats.accepted_draft_tokens > 0.5 * stats.draft_tokens  # 5 of the 6 texts were learnt by heart


@pytest.mark.sweep
def test_a_run_cut_short_goes_on(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "head"
    assert train(target, folder, "--epochs", "1") == 0
    weights = load_file(folder / "model.safetensors")
    from fwk_kit.training import eagle3

    class Stopped(Exception):
        pass

    kept = eagle3.Trainer.accuracy
    calls: list[int] = []

    def once(trainer: eagle3.Trainer) -> list[float]:
        calls.append(trainer.epoch)
        if len(calls) == 2:
            raise Stopped
        return kept(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle3.Trainer, "accuracy", once)
        with pytest.raises(Stopped):
            train(target, folder, "--epochs", "3")
    assert (folder / "training.pt").exists()
    capsys.readouterr()
    assert train(target, folder, "--epochs", "3") == 0
    said = capsys.readouterr()
    assert "continues after epoch 1" in said.out + said.err
    again = load_file(folder / "model.safetensors")
    assert any(not torch.equal(weights[name], again[name]) for name in weights)


def test_later_steps_see_the_texts_and_their_own_drafts() -> None:
    """Training's steps at once are the steps one by one: every place as the end of a text of its own."""
    from fwk.types import ModelConfig
    from fwk_kit.testing.serving import TINY

    config = ModelConfig.from_dict(TINY, "TINY")
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(TINY["vocab_size"], 64, generator=generator)
    torch.manual_seed(4)
    head = Eagle3(config, Target(table, table, (2, 3, 3)), torch.arange(50))
    for weight in head.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    tokens, features = torch.randn(3, 1, 9, 64, generator=generator), torch.randn(1, 9, 64, generator=generator)
    past: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        found, x = [], features
        for step in range(3):
            logits, x = head.step(tokens[step], x, step, past)
            found.append(logits[0])
        for end in range(9):
            inputs, known = tokens[0][:, : end + 1], features[:, : end + 1]
            for step in range(3):
                logits, after = head.step(inputs, known, 0, [])
                torch.testing.assert_close(logits[0, -1], found[step][end], atol=1e-4, rtol=1e-4)
                if step < 2:
                    inputs = torch.cat((inputs, tokens[step + 1][:, end : end + 1]), 1)
                    known = torch.cat((known, after[:, -1:]), 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--speculative-algorithm", "ngram"], "without drafts"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], sentence: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train-draft", str(target), "--out", str(tmp_path / "head"), *words]) != 0
    assert sentence in capsys.readouterr().err


def test_a_model_of_few_layers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = save_llama(tmp_path / "small")
    assert main(["train-draft", str(small), "--out", str(tmp_path / "head")]) != 0
    assert "EAGLE-3 reads three of at least 6" in capsys.readouterr().err
