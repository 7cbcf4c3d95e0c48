"""gpt-oss as it is published, its experts in MXFP4, and the numbers they stand for by transformers' own reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.architectures import GPT_OSS, write
from tests.helpers.lazy import lazy

mxfp4 = lazy("transformers.integrations.mxfp4")


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    """Of torch's own generator."""
    return torch.randint(low, high, shape, dtype=torch.uint8)


def write_packed(folder: Path, **changes: Any) -> Any:
    """A checkpoint with MXFP4 experts, and transformers' model with the same numbers."""
    model = write(folder, "gpt_oss", {**GPT_OSS, **changes})
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, rows, columns = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = random_bytes(count, columns, rows // 32, 16)
        tensors[f"{name}_scales"] = random_bytes(count, columns, rows // 32, low=122, high=126)
        with torch.no_grad():
            model.get_parameter(name).copy_(
                mxfp4.convert_moe_packed_tensors(
                    tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32
                )
            )
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def as_numbers(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Take a matrix's blocks and scales out: the experts as [num_experts, in_features, out_features]."""
    blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
    return mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
