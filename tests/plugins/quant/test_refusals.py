"""Choosing by name and pattern, and checkpoints that are not what they say: one sentence before anything is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.models import make_quantised_context
from tests.helpers.quantised import CHECKPOINTS, checkpoint_twins, online_twins

import fwk
from fwk.errors import ConfigError, FwkError, ModelLoadError, PluginError
from fwk_layers import LMHead, QKVLinear

Q = "model.layers.0.self_attn.q_proj"
LIMITS: dict[str, Any] = {"max_total_tokens": 256, "max_running_requests": 4}


def serve(path: Path, **options: Any) -> fwk.LLM:
    return fwk.LLM(str(path), **LIMITS, **options)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
    """Edit tensors and config.json's quantization_config."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


DAMAGES: dict[str, tuple[str, Callable[[Any, Any], Any], str]] = {
    "another group size": (
        "int4-gptq",
        lambda t, c: c.update(group_size=64),
        r"(?s)qzeros.*\(2, 8\).*\(1, 8\).*group size",
    ),
    "a group size that is none": (
        "int4-gptq",
        lambda t, c: c.update(group_size=0),
        "must be a positive number or -1, not 0",
    ),
    "a group size that does not divide": (
        "int4-gptq",
        lambda t, c: c.update(group_size=48),
        "groups of 48 do not divide",
    ),
    "other bits": ("int4-gptq", lambda t, c: c.update(bits=3), "stored as gptq:3, which no installed quantizer reads"),
    "missing scales": ("int4-gptq", lambda t, c: t.pop(f"{Q}.scales"), rf"'{Q}.scales' is missing"),
    "missing zeros": ("int4-gptq", lambda t, c: t.pop(f"{Q}.qzeros"), rf"'{Q}.qzeros' is missing"),
    "zeros of another type": (
        "int4-gptq",
        lambda t, c: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"].float()}),
        "float32 numbers, .* needs torch.int32",
    ),
    "zeros cut off": (
        "int4-gptq",
        lambda t, c: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"][:, :4]}),
        r"qzeros has the shape \(2, 4\).*\(2, 8\)",
    ),
    "groups out of range": (
        "int4-gptq-act-order",
        lambda t, c: t[f"{Q}.g_idx"].add_(1),
        "g_idx names groups up to 2, but there are 2",
    ),
    "reordered against its word": (
        "int4-gptq",
        lambda t, c: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"].flip(0) + 1}),
        "g_idx names",
    ),
    "an infinite scale": ("int4-awq", lambda t, c: t[f"{Q}.scales"][0].fill_(torch.inf), "a scale is infinite"),
    "another version": ("int4-awq", lambda t, c: c.update(version="gemv"), "stored as awq-gemv:4"),
    "an unknown method": ("int4-awq", lambda t, c: c.update(quant_method="aqlm"), "stored as aqlm, which no installed"),
    "no config group": ("int4-compressed", lambda t, c: c.update(config_groups={}), "no entry of .*'config_groups'"),
    "an unread strategy": (
        "int8-compressed",
        lambda t, c: c["config_groups"]["group_0"]["weights"].update(strategy="block"),
        "scales per 'block'",
    ),
    "bits that differ": (
        "int4-compressed",
        lambda t, c: c["config_groups"]["group_0"]["weights"].update(num_bits=8),
        "config.json says 8 bits",
    ),
    "a missing zero point": (
        "int4-compressed-zeros",
        lambda t, c: t.pop(f"{Q}.weight_zero_point"),
        "weight_zero_point' is missing",
    ),
    "a missing scale": ("int8-compressed", lambda t, c: t.pop(f"{Q}.weight_scale"), "weight_scale' is missing"),
    "floats that are not numbers": (
        "fp8",
        lambda t, c: t[f"{Q}.weight"].view(torch.uint8)[0].fill_(0x7F),
        "infinite or not numbers",
    ),
    "blocks of another size": (
        "fp8-block",
        lambda t, c: c.update(weight_block_size=[64, 128]),
        r"scales in blocks of \[64, 128\] are not read, only of \[128, 128\]",
    ),
    "blocks without a scale": (
        "fp8-block",
        lambda t, c: t.pop(f"{Q}.weight_scale_inv"),
        "weight_scale_inv' is missing",
    ),
    "scales of fewer blocks": (
        "fp8-block",
        lambda t, c: t.update({f"{Q}.weight_scale_inv": t[f"{Q}.weight_scale_inv"][:1]}),
        r"weight_scale_inv has the shape \(1, 2\).* needs \(2, 2\)",
    ),
    "a scale in e4m3 that is no number": (
        "fp4-modelopt",
        lambda t, c: t[f"{Q}.weight_scale"].view(torch.uint8)[0].fill_(0x7F),
        "a scale is infinite or not a number",
    ),
    "a power of two that is no number": (
        "fp4-compressed-mx",
        lambda t, c: t[f"{Q}.weight_scale"][0].fill_(255),
        "a scale is infinite or not a number",
    ),
    "an infinite factor": (
        "fp4-compressed",
        lambda t, c: t[f"{Q}.weight_global_scale"].fill_(0),
        "a scale is infinite or not a number",
    ),
    "a missing factor": (
        "fp4-modelopt",
        lambda t, c: t.pop(f"{Q}.weight_scale_2"),
        "stored as modelopt:NVFP4, which no installed",
    ),
    "activations scaled before": (
        "fp4-modelopt",
        lambda t, c: (c.update(quant_algo="NVFP4_AWQ"), t.update({f"{Q}.pre_quant_scale": torch.ones(64)})),
        "stored as modelopt:NVFP4_AWQ, which no installed",
    ),
    "an algorithm that is not read": (
        "fp8-modelopt",
        lambda t, c: (c.update(quant_algo="MXFP8"), t.update({f"{Q}.weight_scale": torch.zeros(64, 2).byte()})),
        "stored as modelopt:MXFP8, which no installed",
    ),
}


@pytest.mark.gate(10)
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints(name: str, tmp_path: Path) -> None:
    kind, change, message = DAMAGES[name]
    path = changed(checkpoint_twins(kind, tmp_path).path, change)
    with pytest.raises(ModelLoadError, match=message) as caught:
        serve(path)
    assert "\n" not in str(caught.value)


def test_config_without_quantization_config(tmp_path: Path) -> None:
    path = checkpoint_twins("int8-compressed", tmp_path).path
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"q_proj.weight' is quantised \(I8\).*'quantization_config' is missing"):
        serve(path)


def test_every_layer_may_have_a_group_of_its_own(tmp_path: Path) -> None:
    """Targets by name and by expression come before the layer's class."""

    def change(tensors: Any, config: Any) -> None:
        weights = config["config_groups"]["group_0"]["weights"]
        config["config_groups"] = {
            "a": {"targets": ["Linear"], "weights": {**weights, "num_bits": 2}},
            "b": {"targets": [r"re:.*self_attn\..*"], "weights": weights},
            "c": {"targets": [f"model.layers.{i}.mlp.{n}_proj" for i in range(2) for n in ("gate", "up", "down")],
                  "weights": weights},
        }  # fmt: skip

    serve(changed(checkpoint_twins("int4-compressed", tmp_path).path, change)).close()


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        (
            "int4-gptq",
            "int8",
            "--quantization int8 cannot read this checkpoint.*stored as gptq:4; quantizers that do: int4",
        ),
        ("int4-gptq", "none", "--quantization none cannot read"),
        ("int8-compressed", "int4", "--quantization int4 cannot read"),
        ("fp8", "gguf", "--quantization gguf cannot read"),
    ],
)
def test_methods_that_cannot_read_the_checkpoint(name: str, method: str, message: str, tmp_path: Path) -> None:
    path = checkpoint_twins(name, tmp_path).path
    with pytest.raises(ModelLoadError, match=message):
        serve(path, quantization=method)
    right = CHECKPOINTS[name].method
    with serve(path, quantization=right) as llm:
        assert llm.engine.info.chosen["quant"] == f"{right}, none", "the head was left out of the checkpoint"


def test_gguf_method_needs_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"--quantization gguf cannot read this checkpoint.*stored as plain"):
        serve(online_twins("int8", tmp_path).plain, quantization="gguf")


def test_unknown_methods(tmp_path: Path) -> None:
    path = online_twins("int8", tmp_path).path
    with pytest.raises(PluginError, match=r"unknown quantizer 'int9' \(did you mean 'int[48]'\?\)"):
        serve(path, quantization="int9")
    with pytest.raises(PluginError, match="unknown quantizer 'int5'"):
        serve(path, quantization_layers=("lm_head=int5",))


@pytest.mark.parametrize("text", ["lm_head", "=int8", "lm_head="])
def test_patterns_that_are_none(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes PATTERN=METHOD"):
        serve(online_twins("int8", tmp_path).path, quantization_layers=(text,))


def test_patterns_choose_by_layer(tmp_path: Path) -> None:
    path = online_twins("int8", tmp_path).path
    options = {
        "quantization": "int8",
        "quantization_exclude": ("*.layers.0.*",),
        "quantization_layers": ("*.v_proj=fp8", "*_proj=int4", "lm_head=none"),
    }
    context = make_quantised_context(path, plugin_options={"quant.int4": {"int4_group_size": 32}}, **options)
    first, second = QKVLinear(context, "model.layers.0.self_attn"), QKVLinear(context, "model.layers.1.self_attn")
    assert [type(method).__name__ for method, _, _ in first.pieces] == ["PlainMethod"]
    assert [(type(method).__name__, size) for method, _, size in second.pieces] == [
        ("Int4Method", 96),
        ("Fp8Method", 32),
    ]
    assert type(LMHead(context, "lm_head").method).__name__ == "PlainMethod"
    assert context.quant.chosen() == "none, int4, fp8"
    with serve(path, **options, int4_group_size=32) as llm:
        assert llm.engine.info.reasons == []


def test_patterns_that_match_nothing(tmp_path: Path) -> None:
    path = online_twins("int8", tmp_path).path
    for options in ({"quantization_exclude": ("lm_heat",)}, {"quantization_layers": ("*.o_prj=int8",)}):
        with pytest.raises(ConfigError, match=r"quantization pattern '.*' matches no layer of this model"):
            serve(path, **options)


def test_patterns_cannot_unpack_what_is_packed(tmp_path: Path) -> None:
    path = checkpoint_twins("int4-gptq", tmp_path).path
    with pytest.raises(ModelLoadError, match=r"stored as gptq:4, which quantizer 'none' does not read"):
        serve(path, quantization_exclude=("*.o_proj",))
    with serve(path, quantization_layers=("lm_head=int8",)) as llm:
        assert llm.engine.info.chosen["quant"] == "int4, int8"
    with pytest.raises(ModelLoadError, match="lm_head is stored unquantised, and quantizer 'gguf' reads"):
        serve(path, quantization_layers=("lm_head=gguf",))


def test_options_belong_to_their_method(tmp_path: Path) -> None:
    path = online_twins("int8", tmp_path).path
    with pytest.raises(ConfigError, match=r"--int4-group-size belongs to quant.int4, which is not selected"):
        serve(path, quantization="int8", int4_group_size=32)
    with pytest.raises(ConfigError, match=r"--int4-group-size"):
        serve(path, quantization="int4", int4_group_size=48)
    with pytest.raises(FwkError, match=r"groups of 128 do not divide its 64 inputs.*--quantization-exclude"):
        serve(path, quantization="int4", int4_group_size=128)
