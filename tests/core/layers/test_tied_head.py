"""A head that the config takes for the embedding, and that the checkpoint has besides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import reference_logits, token_ids


@pytest.mark.parametrize("differs", [True, False])
def test_a_head_with_other_numbers_is_read(differs: bool, tmp_path: Path) -> None:
    """As transformers does it; the same numbers again are no other head."""
    from tests.helpers.architectures import close, write
    from tests.helpers.checkpoints import change_config
    from tests.helpers.models import RunnableModel

    reference = write(tmp_path, "llama", {"tie_word_embeddings": False, "num_hidden_layers": 1})
    change_config(tmp_path, tie_word_embeddings=True)
    if not differs:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, tmp_path / "model.safetensors")
        with torch.no_grad():
            reference.get_parameter("lm_head.weight").copy_(tensors["lm_head.weight"])
    prompt = token_ids(9)
    close(RunnableModel(tmp_path).logits(prompt), reference_logits(reference, prompt))
