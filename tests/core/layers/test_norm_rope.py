"""Norms and rotary embedding in numbers."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.lazy import lazy
from tests.helpers.models import Tensors, make_context

from fwk.errors import ModelLoadError
from fwk.types import ModelConfig, RopeConfig
from fwk_layers import RMSNorm, RotaryEmbedding
from fwk_layers.rope import inverse_frequencies

modeling_llama = lazy("transformers.models.llama.modeling_llama")

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_rms_norm_rounds_as_transformers(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(1)
    weight = torch.randn(64)
    norm = RMSNorm(
        make_context(ModelConfig.from_dict(RAW, "test"), Tensors({"n.weight": weight}), dtype=dtype), "n", 64, 1e-5
    )
    reference = modeling_llama.LlamaRMSNorm(64, 1e-5)
    with torch.no_grad():
        reference.weight.copy_(weight)
    x, y = (torch.randn(2, 9, 64) * scale).to(dtype)
    with torch.inference_mode():
        wanted = reference.to(dtype)(x)
        before = x.clone()
        torch.testing.assert_close(norm(x), wanted, atol=0, rtol=1e-6 if dtype == torch.float32 else 0.008)
        assert torch.equal(x, before)
        total = x + y
        normed, residual = norm.add(y, x)
        assert torch.equal(residual, total)
        torch.testing.assert_close(normed, norm(total))
        normed, residual = norm.add(total, None)
        assert residual is total


@pytest.mark.parametrize("partial", [None, 0.5])
def test_rotation_equals_transformers(partial: float | None) -> None:
    raw = RAW | ({} if partial is None else {"partial_rotary_factor": partial})
    context = make_context(ModelConfig.from_dict(raw, "test"), Tensors({}), max_model_len=40)
    rotary = RotaryEmbedding(context)
    size = 32 if partial is None else 16
    x = torch.randn(7, 3, 32)
    positions = torch.tensor([0, 3, 39, 3, 17, 1, 30])
    angles = positions[:, None].float() * 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.cat((angles, angles), -1)
    wanted = x.clone()
    wanted[..., :size] = modeling_llama.apply_rotary_pos_emb(x[..., :size], x[..., :size], angles.cos(), angles.sin())[
        0
    ]
    mine = rotary.rotate(x, rotary.rows(positions))
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=0)
    assert mine is x


def test_table_is_as_long_as_the_model_may_run() -> None:
    context = make_context(ModelConfig.from_dict(RAW, "test"), Tensors({}), max_model_len=40)
    assert RotaryEmbedding(context).cos.shape == (40, 1, 32)


def test_incomplete_scaling_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"'llama3' needs a positive number for 'low_freq_factor'.*None"):
        inverse_frequencies(RopeConfig(kind="llama3", scaling={"factor": 8.0}), 32, 100)
    with pytest.raises(ModelLoadError, match="rope scaling 'wavy' is not known; this fwk computes default"):
        inverse_frequencies(RopeConfig(kind="wavy"), 32, 100)
