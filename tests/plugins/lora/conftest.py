"""One tiny base model, four adapters of different kinds, and what peft makes of each when it merges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.adapters import make_adapter, make_base
from tests.helpers.lora_adapters import ADAPTERS

import fwk


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``; for each adapter its folder, and the merged checkpoint in ``NAME-merged``."""
    root = tmp_path_factory.mktemp("lora")
    make_base(root / "base")
    for seed, (name, settings) in enumerate(ADAPTERS.items(), 1):
        make_adapter(root / "base", root / name, root / f"{name}-merged", seed=seed, **settings)
    return root


@pytest.fixture(scope="module")
def serve(folders: Path) -> Iterator[Callable[..., fwk.LLM]]:
    """Engines on a folder, one per set of options; ``adapters`` are loaded at the start."""
    made: dict[str, fwk.LLM] = {}

    def make(model: str = "base", adapters: tuple[str, ...] = (), **options: Any) -> fwk.LLM:
        key = repr((model, adapters, sorted(options.items())))
        if key not in made:
            settings = {"max_total_tokens": 4096, "max_running_requests": 32, "check_blocks": True, **options}
            if adapters:
                settings |= {"enable_lora": True, "lora_paths": [f"{name}={folders / name}" for name in adapters]}
            made[key] = fwk.LLM(str(folders / model), **settings)
        return made[key]

    yield make
    for llm in made.values():
        llm.close()
