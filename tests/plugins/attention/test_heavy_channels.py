"""``fwk heavy-channels``: its file is of what the model computes, and the server takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.helpers.lazy import lazy
from tests.helpers.tiny import save_llama

import fwk
from fwk import SamplingParams
from fwk.cli.main import main

modeling_llama = lazy("transformers.models.llama.modeling_llama")
transformers = lazy("transformers")

PROMPTS = ["one two three", "the sun the moon", "0 1 2 3 4 5 6 7"]


def test_channels_are_those_of_an_independent_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean sizes of rotated queries and keys, over the prompts and the answers but their last tokens."""
    folder, out = save_llama(tmp_path / "model", seed=1), tmp_path / "channels.json"
    data = tmp_path / "prompts.txt"
    data.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    words = ["heavy-channels", str(folder), "--out", str(out), "--data", str(data), "--max-tokens", "4"]
    assert main([*words, "--dtype", "float32"]) == 0
    lists = json.loads(out.read_text())
    with fwk.LLM(str(folder), dtype="float32", max_total_tokens=1024) as llm:
        done = llm.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=0.0))
        texts = [llm.text.encode(text) + d.token_ids[:-1] for text, d in zip(PROMPTS, done, strict=True)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    rotate = modeling_llama.apply_rotary_pos_emb

    def rotated(q: torch.Tensor, k: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(rotate(q, k, *more))
        return seen[-1]

    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", rotated)
    with torch.inference_mode():
        for text in texts:
            model(torch.tensor([text]))
    layers = model.config.num_hidden_layers
    assert len(lists) == 3 * layers
    for index in range(layers):
        name = f"model.layers.{index}.self_attn"
        q, k = (torch.cat([x[i][0] for x in seen[index::layers]], 1).double().abs().mean(1) for i in range(2))
        shared = q.unflatten(0, (len(k), -1)).mean(1)
        for kind, sizes in (("q", shared), ("k", k), ("qk", shared * k)):
            order = torch.tensor(lists[f"{name}.{kind}_proj"])
            assert order.shape == sizes.shape
            assert torch.equal(order.sort(1).values, torch.arange(order.shape[1]).expand_as(order))
            found = sizes.gather(1, order)
            assert bool((found[:, :-1] >= found[:, 1:] * (1 - 1e-4)).all()), (name, kind)


def test_wrong_words_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for more, why in (
        (["--out", str(tmp_path / "no" / "x.json")], "No such file or directory"),
        (["--out", str(tmp_path / "x.json"), "--data", str(empty)], "holds no prompts"),
        (["--out", str(tmp_path / "x.json"), "--max-tokens", "0"], "--max-tokens must be at least 1"),
    ):
        assert main(["heavy-channels", *more]) != 0
        assert why in capsys.readouterr().err
