"""Loading on a device: the host copies each byte once, and rounds, joins, encodes and invents nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.architectures import write
from tests.helpers.pretend_cuda import JOURNAL, pretended
from tests.helpers.tiny import save_llama

import fwk
from fwk.worker.builder import WorkerBuilder
from fwk.worker.kv.states import StateStore
from fwk.worker.loading.weights import TrackedWeights
from fwk_kit.testing.serving import TINY
from fwk_loaders.dummy import weights as dummy

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
OPTIONS: dict[str, Any] = {
    "device": "pretended",
    "dtype": "bfloat16",
    "max_total_tokens": 64,
    "max_running_requests": 2,
    "max_prefill_tokens": 16,
    **{name: "torch" for name in ("attention_backend", "operator_backend", "sampling_backend")},
}
WORK = ("_to_copy", "copy_", "cat", "stack", "clone", "normal_", "mul", "div", "index_select", "contiguous")
"""What a pass over weights would be."""


def loaded(folder: Path, **options: Any) -> tuple[int, int]:
    """Bytes of weights that the host worked on, and that it sent, up to when all are there."""
    found: list[tuple[int, int]] = []
    states = WorkerBuilder._states

    def after_weights(self: WorkerBuilder, num_drafted: int) -> StateStore | None:
        found.append((sum(JOURNAL.host_bytes[name] for name in WORK), JOURNAL.sent_bytes))
        return states(self, num_drafted)

    with pretended() as plugins, pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerBuilder, "_states", after_weights)
        with fwk.LLM(str(folder), plugins=plugins, **OPTIONS | options):
            pass
    return found[0]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), **SIZES)


def weight_bytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.gate(2)
@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_byte_of_the_file_is_copied_once(stored: Path, quantization: str, dtype: str) -> None:
    worked, sent = loaded(stored, quantization=quantization, dtype=dtype)
    total = weight_bytes(stored)
    assert 0.95 * total < sent < 1.1 * total
    assert worked < 0.02 * total, JOURNAL.host_bytes


def test_a_pass_on_the_host_is_seen(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(self: TrackedWeights, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        return self.tensor(name, shape).to(torch.bfloat16).to(device)

    monkeypatch.setattr(TrackedWeights, "tensor_on", rounded)
    worked, _ = loaded(stored)
    assert worked > 0.4 * weight_bytes(stored)


@pytest.mark.sweep
def test_experts_are_stacked_on_the_device(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", {})
    worked, sent = loaded(tmp_path)
    assert sent > 0.9 * weight_bytes(tmp_path)
    assert worked < 0.05 * sent, JOURNAL.host_bytes


def test_large_dummy_weights_are_made_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | SIZES))
    generator = torch.Generator
    wanted: list[torch.device] = []

    def of_the_host(device: torch.device | str = "cpu") -> torch.Generator:
        """The pretended device has no generator of its own."""
        wanted.append(torch.device(device))
        return generator("cpu")

    monkeypatch.setattr(torch, "Generator", of_the_host)
    _, many = loaded(tmp_path, load_format="dummy")
    assert {device.type for device in wanted} == {"cpu"}
    wanted.clear()
    monkeypatch.setattr(dummy, "HOST_NUMBERS", 0)
    worked, few = loaded(tmp_path, load_format="dummy")
    assert {device.type for device in wanted} == {"privateuseone"}
    assert few < 0.05 * many
    assert worked < 0.05 * many


def test_dummy_weights_are_the_same_in_every_run() -> None:
    source = dummy.DummyWeights({"dtype": "bfloat16"})
    size, device = (1030, 1024), torch.device("cpu")
    one = source.tensor_on("model.layers.0.mlp.up_proj.weight", size, device)
    assert one.dtype == torch.bfloat16
    assert torch.equal(one, source.tensor_on("model.layers.0.mlp.up_proj.weight", size, device))
    assert not torch.equal(one, source.tensor_on("model.layers.1.mlp.up_proj.weight", size, device))
    assert abs(float(one.float().std()) - dummy.STD) < 1e-3
    small = source.tensor_on("lm_head.weight", (8, 4), device)
    assert torch.equal(small, source.tensor("lm_head.weight", (8, 4))), "small ones are the same on every device"
