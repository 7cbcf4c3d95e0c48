"""bitsandbytes: the package's own numbers and products, from plain checkpoints and from those of transformers."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.helpers.int8 import exact, int_mm, saturating
from tests.helpers.lazy import lazy
from torch import Tensor

import fwk
from fwk import SamplingParams
from fwk.errors import ModelLoadError, PluginError
from fwk.interfaces.declaration import Facts
from fwk.interfaces.quant import LinearShape, QuantContext
from fwk.plugins import build, find
from fwk.plugins.selection import plugin_options
from fwk_kit.testing import QuantizerSuite
from fwk_kit.testing.base import installed
from fwk_loaders.dummy.tokenizer import build_tokenizer

bitsandbytes = lazy("bitsandbytes")
transformers = lazy("transformers")

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")

PLUGINS = installed()
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [[3, 9, 27, 81, 243, 11], [200, 100, 50, 25], [5] * 20]


class BitsandbytesSuite(QuantizerSuite):
    plugin = "bitsandbytes"

    def packed(self, layout: str, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        kind = layout.partition(":")[2]
        if layout == "plain":
            return {"weight": weight}, weight
        if kind == "int8":
            numbers, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
            return {"weight": numbers, "SCB": scales}, numbers * scales[:, None] / 127
        packed, state = bitsandbytes.functional.quantize_4bit(
            weight, blocksize=64, quant_type=kind, compress_statistics=True
        )
        stored = {f"weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
        return {"weight": packed, **stored}, bitsandbytes.functional.dequantize_4bit(packed, state)


class TestNf4(BitsandbytesSuite):
    max_error = 0.13

    def test_numbers_of_checkpoints_are_kept(self) -> None:
        """Those of four bits, as activations of int8 are rounded."""
        item = self.registered()
        for layout in ("bitsandbytes:nf4", "bitsandbytes:fp4"):
            weights, numbers = self.checkpoint(item, layout)
            fused = self.fused(self.context(item, layout, weights))
            x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
            with torch.inference_mode():
                wanted = F.linear(x, torch.cat([numbers["m.gate_proj"], numbers["m.up_proj"]]))
                torch.testing.assert_close(fused(x), wanted, atol=2e-4, rtol=1e-5)


class TestFp4(BitsandbytesSuite):
    max_error = 0.16
    options = {"bitsandbytes_type": "fp4"}


class TestInt8(BitsandbytesSuite):
    max_error = 0.16
    options = {"bitsandbytes_type": "int8"}


def method(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    item = find(PLUGINS, "quant", "bitsandbytes")
    given = plugin_options(item, {item.key: options})
    return build(item, QuantContext(torch.device("cpu"), dtype, {}, given))


def shape(rows: int, columns: int) -> LinearShape:
    return LinearShape(columns, (rows,), torch.float32, torch.device("cpu"), "m")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bits_are_the_packages_own(kind: str, dtype: torch.dtype) -> None:
    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(1))
    made = method(dtype, bitsandbytes_type=kind)
    weights = made.finish(made.encode(weight, "m"), shape(48, 192))
    packed, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type=kind)
    assert torch.equal(weights.packed.view(-1), packed.view(-1))
    for count in (1, 7):
        x = torch.randn(count, 192, generator=torch.Generator().manual_seed(count)).to(dtype)
        wanted = bitsandbytes.matmul_4bit(x, packed.view(-1, 1), state)
        assert torch.equal(made.apply(weights, x, None), wanted)


@pytest.mark.parametrize("product", [None, saturating], ids=["", "saturating"])
def test_int8_is_the_packages_own_where_no_other_token_is(product: Any) -> None:
    """LLM.int8() of one token, with outliers and without; the package works in half precision at the end."""
    with int_mm(product):
        _int8_is_the_packages_own()


def _int8_is_the_packages_own() -> None:
    made = method(bitsandbytes_type="int8")
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    weights = made.finish(made.encode(weight, "m"), shape(64, 128))
    numbers, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
    assert torch.equal(weights.numbers, numbers)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(3))
    x[1, 5], x[2, 7], x[2, 90] = 40.0, -25.0, 7.0
    for row in x.split(1):
        state = bitsandbytes.MatmulLtState()
        state.CB, state.SCB, state.threshold, state.has_fp16_weights = numbers, scales, 6.0, False
        state.is_training = False  # or it would multiply with unpacked weights
        with int_mm(exact):
            wanted = bitsandbytes.matmul(row.half(), numbers, state=state)
        torch.testing.assert_close(made.apply(weights, row, None), wanted.float(), atol=0.02, rtol=2e-3)
    together = made.apply(weights, x, None)
    alone = torch.cat([made.apply(weights, row, None) for row in x.split(1)])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-5)
    full = F.linear(x, numbers * scales[:, None] / 127)
    kept_out = (together - full).norm(dim=1)
    rounded = (method(bitsandbytes_type="int8", bitsandbytes_threshold=0).apply(weights, x, None) - full).norm(dim=1)
    assert torch.equal(kept_out[[0, 3]], rounded[[0, 3]]), "tokens without outliers are rounded alike"
    assert (kept_out[[1, 2]] < rounded[[1, 2]] / 2).all(), "an outlier spoils the scale of its token, unless kept out"


def test_rows_that_are_no_whole_number_of_blocks_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="leave the layer out"):
        method().encode(torch.randn(8, 96), "m")


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("fwk.interfaces.declaration.installed_version", missing)
    said = find(PLUGINS, "quant", "bitsandbytes").declaration.refusal(Facts())
    assert said == "needs the package bitsandbytes>=0.46: pip install 'bitsandbytes>=0.46'"


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "stored as bfloat16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint."""
    torch.manual_seed(4)
    made = tmp_path_factory.mktemp("bnb") / "plain"
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        initializer_range=0.15,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    build_tokenizer(320, "test").save(str(made / "tokenizer.json"))
    return made


def quantised(folder: Path, name: str) -> tuple[Path, Any]:
    """A checkpoint written by transformers, and its model."""
    given = CHECKPOINTS[name]
    if "load_in_4bit" in given:
        given = {**given, "bnb_4bit_compute_dtype": torch.float32}
    config = transformers.BitsAndBytesConfig(**given)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    where = folder.parent / name.replace(" ", "-")
    if not where.exists():
        model.save_pretrained(where)
        build_tokenizer(320, "test").save(str(where / "tokenizer.json"))
    # On CPUs with products of bfloat16 the package's own layers round float32 activations to that.
    for path, layer in list(model.named_modules()):
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            plain.weight.data = bitsandbytes.functional.dequantize_4bit(
                layer.weight.data, layer.weight.quant_state
            ).float()
            model.set_submodule(path, plain)
    return where, model


def served(path: Path, **options: Any) -> tuple[list[list[int]], list[list[float]], str]:
    given = {"dtype": "float32", "max_total_tokens": 1024, "max_running_requests": 4, **options}
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=1)
    with fwk.LLM(str(path), **given) as llm:
        done = llm.generate(PROMPTS, sampling)
        scores = [[entry.logprob for entry in x.logprobs or []] for x in done]
        return [x.token_ids for x in done], scores, llm.engine.info.chosen["quant"]


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_of_transformers(folder: Path, name: str) -> None:
    where, model = quantised(folder, name)
    tokens, scores, chosen = served(where)
    assert chosen == "bitsandbytes, none"  # the head stays plain
    for prompt, ours, logprobs in zip(PROMPTS, tokens, scores, strict=True):
        with torch.no_grad(), int_mm(exact):
            logits = model(torch.tensor([[*prompt, *ours]])).logits[0, len(prompt) - 1 : -1].float()
        theirs = logits.log_softmax(-1)[range(len(ours)), ours]
        tolerance = 0.08 if name == "int8" else 1e-3  # activations rounded to 8 bits, and outliers by column
        torch.testing.assert_close(torch.tensor(logprobs), theirs, atol=tolerance, rtol=1e-3)
        if name != "int8":
            assert logits.argmax(-1).tolist() == ours


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_plain_checkpoints_become_what_transformers_makes_of_them(folder: Path, kind: str) -> None:
    where, _ = quantised(folder, kind)
    online = served(folder, quantization="bitsandbytes", bitsandbytes_type=kind, quantization_exclude=("lm_head",))
    assert online[0] == served(where)[0]


@pytest.mark.sweep
def test_damaged_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    where, _ = quantised(folder, "nested")
    stored = load_file(where / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    state = f"{name}.quant_state.bitsandbytes__nf4"

    def changed(**changes: Any) -> Tensor:
        told = json.loads(bytes(stored[state].tolist())) | changes
        return torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)

    for tensors, why in (
        ({state: torch.tensor(list(b"{"), dtype=torch.uint8)}, "no JSON"),
        ({state: torch.tensor(list(b"[1]"), dtype=torch.uint8)}, "no JSON object"),
        ({state: changed(shape=[4, 4])}, r"stored as \[4, 4\], but the model needs \[192, 128\]"),
        ({state: changed(blocksize=48)}, "in blocks of 48"),
        ({name: stored[name][:7]}, r"\(7, 1\) of torch.uint8"),
        ({f"{name}.absmax": stored[f"{name}.absmax"][:5]}, "5 scales of 64 numbers each"),
    ):
        folder = tmp_path / "damaged"
        shutil.copytree(where, folder, dirs_exist_ok=True)
        save_file(stored | tensors, folder / "model.safetensors")
        with pytest.raises(ModelLoadError, match=why):
            served(folder)
    save_file(
        stored | {"model.layers.0.mlp.up_proj.weight_format": torch.tensor(1, dtype=torch.uint8)},
        folder / "model.safetensors",
    )
    with pytest.raises(ModelLoadError, match="belong to no layer"):
        served(folder)


def test_another_format_cannot_be_asked_of_it(folder: Path) -> None:
    where, _ = quantised(folder, "nf4")
    with pytest.raises((ModelLoadError, PluginError), match=r"cannot read this checkpoint, .* bitsandbytes:nf4"):
        served(where, quantization="int8")
