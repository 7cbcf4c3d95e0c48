"""Models in stages: each reads its own weights, and together they compute what one worker does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.architectures import ARCHITECTURES, write
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.models import RunnableModel, allocate, make_context
from tests.helpers.ranks import FakeStage, StageRank
from torch import Tensor

from fwk.interfaces.model import Model
from fwk.plugins import discover, find, load_object
from fwk.worker.loading.weights import TrackedWeights
from fwk_kit.testing.batches import block_tables, make_batch
from fwk_kit.testing.weights import Tensors

TOKENS = [(7 * i) % 250 + 20 for i in range(40)]
CHUNKS = (17, 22, 1)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_hidden_layers": 3}),
    ("llama", {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    ("deepseek_v2", {"num_hidden_layers": 3}),
    ("qwen3_moe", {"num_hidden_layers": 3}),
    ("gemma3", {"num_hidden_layers": 4}),
]


class Staged:
    """The stages of a model that one worker has, too."""

    def __init__(self, folder: Path, whole: RunnableModel, count: int) -> None:
        hidden: list[Tensor] = []
        self.hidden = hidden
        self.models: list[Model] = []
        self.read: list[set[str]] = []
        self.contexts = [
            make_context(
                whole.context.config,
                TrackedWeights(Tensors.of_folder(folder)),
                tp=StageRank(FakeStage(index, count, hidden)),
            )
            for index in range(count)
        ]
        for context in self.contexts:
            with torch.inference_mode():
                self.models.append(load_object(find(discover(), "models", whole.spec))(context))
            allocate(context, 64)
            assert isinstance(context.weights, TrackedWeights)
            self.read.append(set(context.weights.read_since(0)))

    def logits(self) -> Tensor:
        """Of all of ``TOKENS``, in ``CHUNKS``."""
        past, found = 0, list[Tensor]()
        (table,) = block_tables([len(TOKENS)])
        for length in CHUNKS:
            last = torch.empty(0)
            for model, context in zip(self.models, self.contexts, strict=True):
                batch = make_batch([past], [length], [table], token_ids=[TOKENS[past : past + length]])
                batch.plan = context.attention.plan(batch, context.attention_layers)
                with torch.inference_mode():
                    last = model.forward(batch)
            found.append(self.models[-1].logits(last))
            past += length
        assert not self.hidden
        return torch.cat(found)


@pytest.mark.parametrize(("kind", "changes"), CASES)
@pytest.mark.parametrize("count", [2, 3])
def test_stages_compute_what_one_worker_does(tmp_path: Path, kind: str, changes: dict[str, Any], count: int) -> None:
    make_checkpoint(tmp_path, kind, **changes)
    whole = RunnableModel(tmp_path)
    wanted = whole.logits(TOKENS, CHUNKS)
    staged = Staged(tmp_path, whole, count)
    assert sum(len(context.attention_layers) for context in staged.contexts) == len(whole.layers)
    assert set().union(*staged.read) >= set(whole.weights.names()) - {"lm_head.weight"}
    layers = [{name.split("layers.")[1].split(".")[0] for name in mine if "layers." in name} for mine in staged.read]
    assert [sorted(map(int, mine)) for mine in layers] == [list(context.layers) for context in staged.contexts]
    is_tied = changes.get("tie_word_embeddings", kind == "gemma3")
    embedding = ["model.embed_tokens.weight" in mine for mine in staged.read]
    assert embedding == [True, *[False] * (count - 2), is_tied]
    torch.testing.assert_close(staged.logits(), wanted, rtol=0, atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_that_says_so_is_divided(tmp_path: Path, kind: str) -> None:
    write(tmp_path, *ARCHITECTURES[kind])
    whole = RunnableModel(tmp_path)
    if not whole.model.divides_layers:
        pytest.skip(f"{whole.spec} keeps its layers in one worker")
    wanted = whole.logits(TOKENS, CHUNKS)
    torch.testing.assert_close(Staged(tmp_path, whole, 2).logits(), wanted, rtol=0, atol=0)
