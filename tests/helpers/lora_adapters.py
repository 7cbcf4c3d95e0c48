"""Adapters of all shapes, by name."""

from __future__ import annotations

from typing import Any

from tests.helpers.adapters import ALL_LINEAR

ADAPTERS: dict[str, dict[str, Any]] = {
    "narrow": {},
    "wide": {"target_modules": ALL_LINEAR, "r": 8, "use_rslora": True},
    "odd": {
        "target_modules": ["k_proj", "o_proj", "up_proj", "down_proj"],
        "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.(up|down)_proj": 6},
        "alpha_pattern": {"model.layers.0.self_attn.k_proj": 5, "up_proj": 3},
    },
    "last": {"layers_to_transform": [1], "target_modules": ["v_proj", "gate_proj"], "r": 1},
}
