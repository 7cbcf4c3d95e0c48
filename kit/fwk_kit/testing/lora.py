"""What LoRA kernels, and sources of adapters, must do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.lora import (
    AdaptedBatch,
    LoRABackend,
    LoRAContext,
    LoRALayer,
    LoRAMatrices,
    LoRAPart,
    LoRASource,
    LoRASourceContext,
)
from fwk.plugins import Registered
from fwk_kit.testing.base import PluginSuite
from fwk_kit.testing.batches import block_tables, make_batch
from fwk_kit.testing.served import ServedSuite

SLOTS, MAX_RANK, INPUTS = 3, 8, 24
OUTPUTS = (16, 10)


def adapter(seed: int, rank: int, *, only: int | None = None) -> list[LoRAMatrices | None]:
    """Random matrices for the layer's parts, or for one of them."""
    random = torch.Generator().manual_seed(seed)
    made: list[LoRAMatrices | None] = []
    for part, size in enumerate(OUTPUTS):
        a, b = torch.randn(rank, INPUTS, generator=random), torch.randn(size, rank, generator=random)
        made.append(LoRAMatrices(a, b, 0.5 + seed) if only in (None, part) else None)
    return made


def batch_of(slots: Sequence[int] | None, num_tokens: int) -> AdaptedBatch:
    """A step in which token i is of the adapter in ``slots[i]``."""
    batch = make_batch([0], [num_tokens], block_tables([num_tokens]))
    if slots is None:
        return AdaptedBatch.of(batch)
    ids = np.array(slots, np.int32)
    return AdaptedBatch.of(batch, torch.from_numpy(ids), ids)


class LoRABackendSuite(ServedSuite):
    """Mixed adapters in one step, against their matrices multiplied out in float64."""

    family = "lora"
    interface = LoRABackend
    serve_with: ClassVar[Mapping[str, Any]] = {"enable_lora": True}
    tolerance: ClassVar[float] = 1e-4

    def serve_words(self, item: Registered, folder: Path) -> list[str]:
        """With an adapter ``one``, of rank 2, that changes every answer."""
        down = {"lora_A": np.ones((2, 128), np.float32), "lora_B": np.ones((64, 2), np.float32)}
        names = [f"base_model.model.model.layers.{layer}.mlp.down_proj" for layer in range(2)]
        (folder / "one").mkdir()
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2000, "target_modules": ["down_proj"]}
        (folder / "one/adapter_config.json").write_text(json.dumps(settings))
        save_file(
            {f"{name}.{part}.weight": array for name in names for part, array in down.items()},
            folder / "one/adapter_model.safetensors",
        )
        return [*super().serve_words(item, folder), "--lora-paths", f"one={folder / 'one'}"]

    def backend(self, item: Registered) -> tuple[LoRABackend, LoRALayer]:
        """A backend with one layer of two parts."""
        context = LoRAContext(torch.device("cpu"), torch.float32, SLOTS, MAX_RANK, self.given(item))
        made: LoRABackend = self.make(item, context)
        parts = [LoRAPart(f"m.{i}", INPUTS, size, range(INPUTS), range(size)) for i, size in enumerate(OUTPUTS)]
        return made, made.register(parts)

    def put(self, backend: LoRABackend, layer: LoRALayer, slot: int, matrices: list[LoRAMatrices | None]) -> None:
        """Bring an adapter into a slot."""
        backend.load(slot, {layer.index: backend.pack(layer, matrices)})

    def check(
        self, backend: LoRABackend, layer: LoRALayer, slots: Sequence[int] | None, held: dict[int, Any], count: int = 0
    ) -> None:
        """Run a step and compare each token's sum."""
        num_tokens = count if slots is None else len(slots)
        random = torch.Generator().manual_seed(num_tokens)
        x = torch.randn(num_tokens, INPUTS, generator=random)
        y = torch.randn(num_tokens, sum(OUTPUTS), generator=random)
        wanted, before = y.double().clone(), x.clone()
        for token, slot in enumerate(slots or ()):
            for part, matrices in enumerate(held.get(slot, ())):
                if matrices is not None:
                    start = sum(OUTPUTS[:part])
                    share = matrices.scale * (matrices.b.double() @ (matrices.a.double() @ x[token].double()))
                    wanted[token, start : start + OUTPUTS[part]] += share
        with torch.inference_mode():
            backend.plan(batch_of(slots, max(num_tokens, 1)))
            out: Tensor = backend.apply(y, x, layer)
        assert torch.equal(x, before), "apply() changed its input"
        torch.testing.assert_close(out.double(), wanted, atol=self.tolerance, rtol=self.tolerance)

    def exercise(self, item: Registered) -> None:
        self.test_mixed_adapters_in_one_step(item)

    def test_mixed_adapters_in_one_step(self, item: Registered) -> None:
        backend, layer = self.backend(item)
        held = {0: adapter(1, 4), 1: adapter(2, MAX_RANK), 2: adapter(3, 1, only=1)}
        for slot, matrices in held.items():
            self.put(backend, layer, slot, matrices)
        for slots in ([0, 0, 0], [-1, 0, 1, 2, 2, -1, 0], [2], [-1, -1], [1, 0] * 20):
            self.check(backend, layer, slots, held)

    def test_a_step_without_adapters_changes_nothing(self, item: Registered) -> None:
        backend, layer = self.backend(item)
        self.put(backend, layer, 0, adapter(1, 4))
        self.check(backend, layer, [0, -1], {0: adapter(1, 4)})
        self.check(backend, layer, None, {}, count=3)

    def test_a_slot_is_replaced_and_cleared(self, item: Registered) -> None:
        backend, layer = self.backend(item)
        for seed, rank in ((1, 4), (5, 2), (6, 8)):
            self.put(backend, layer, 1, adapter(seed, rank))
            self.check(backend, layer, [1, -1, 1], {1: adapter(seed, rank)})
        backend.clear(1)
        self.check(backend, layer, [-1, -1], {})

    def test_a_layer_an_adapter_leaves_alone(self, item: Registered) -> None:
        backend, layer = self.backend(item)
        backend.load(0, {})
        self.put(backend, layer, 1, adapter(2, 4, only=0))
        self.check(backend, layer, [0, 1, 0], {1: adapter(2, 4, only=0)})

    def test_two_backends_do_not_share(self, item: Registered) -> None:
        made = [(*self.backend(item), adapter(seed, 4)) for seed in (1, 2)]
        for backend, layer, matrices in made:
            self.put(backend, layer, 0, matrices)
        for backend, layer, matrices in made:
            self.check(backend, layer, [0, -1, 0], {0: matrices})


WRONG_NAMES = ("nobody-has-this", "../secret", "/etc/passwd", "a/../../b", "", ".", "..", "a\0b", "~root", "x" * 5000)
"""What clients may call an adapter."""


class LoRASourceSuite(PluginSuite):
    """Names from clients lead nowhere they should not.

    Override ``prepare`` to make an adapter the source finds; without it only the refusals are tested.
    """

    family = "lora_sources"
    interface = LoRASource

    def prepare(self, folder: Path) -> tuple[dict[str, object], str] | None:
        """Make an adapter below ``folder``: the plugin's options with which it is found, and its name."""
        return None

    def source(self, item: Registered, options: dict[str, object] | None = None) -> LoRASource:
        """A source with these options instead of the suite's."""
        own = type(self).__new__(type(self))
        given = {**self.options, **(options or {})}
        model = item.declaration.options
        return own.make(item, LoRASourceContext(model.model_validate(given) if model is not None else None))

    def prepared(self, item: Registered, folder: Path) -> tuple[LoRASource, str]:
        """A source with an adapter, or a skip."""
        made = self.prepare(folder)
        if made is None:
            pytest.skip("the suite makes no adapter: override prepare()")
        return self.source(item, made[0]), made[1]

    def test_is_open_is_an_answer(self, item: Registered) -> None:
        assert self.source(item).is_open in (True, False)

    def test_unknown_names_are_unknown(self, item: Registered, tmp_path: Path) -> None:
        made = self.prepare(tmp_path)
        for source in [self.source(item), *([self.source(item, made[0])] if made else [])]:
            for name in WRONG_NAMES:
                assert source.find(name) is None, f"find({name!r}) found something"

    def test_a_folder_without_an_adapter_is_no_adapter(self, item: Registered, tmp_path: Path) -> None:
        assert self.source(item).open(tmp_path) is None

    def test_finds_and_reads(self, item: Registered, tmp_path: Path) -> None:
        source, name = self.prepared(item, tmp_path)
        assert source.is_open
        path = source.find(name)
        assert path is not None
        assert path.resolve().is_relative_to(tmp_path.resolve())
        first, second = source.open(path), source.open(path)
        assert first is not None
        assert second is not None
        assert first.modules, "an adapter without modules"
        assert first.fingerprint == second.fingerprint, "the same adapter, another fingerprint"
        for module, matrices in first.modules.items():
            assert not module.endswith(".weight")
            assert matrices.a.shape[0] == matrices.b.shape[1] == matrices.rank

    def test_a_damaged_adapter_is_refused_without_its_folder(self, item: Registered, tmp_path: Path) -> None:
        source, name = self.prepared(item, tmp_path)
        path = source.find(name)
        assert path is not None
        largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        with pytest.raises(ModelLoadError) as caught:
            source.open(path)
        assert str(tmp_path) not in str(caught.value), "clients are told of the server's folders"
