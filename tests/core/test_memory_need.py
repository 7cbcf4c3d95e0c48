"""What weights will take is said before they are read, and what cannot fit is refused with the numbers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.quantised import gguf_twins
from tests.helpers.tiny import save_llama

import fwk
from fwk import QuantizerSpec
from fwk.errors import ConfigError
from fwk.interfaces.device import MemoryInfo
from fwk.setup import memory_need
from fwk.setup.memory_need import estimate
from fwk.worker.kv.kv_cache import MemoryLimit, bytes_limit, count_blocks, fraction_limit
from fwk.worker.kv.memory_profile import MemoryUse

PLAIN = QuantizerSpec(name="none", load="x:Y", exact=("plain",), api=2)
INT8 = QuantizerSpec(name="int8", load="x:Y", bits=8.0, api=2)
GGUF = QuantizerSpec(name="gguf", load="x:Y", layouts=("gguf:Q8_0", "plain"), exact=("gguf:Q8_0",), api=2)
SIZES = {"plain": (1000, 2000), "gguf:Q8_0": (3200, 3400)}


def test_estimate() -> None:
    assert estimate(SIZES, PLAIN, 2) == 2 * 4200
    assert estimate(SIZES, PLAIN, 4) == 4 * 4200
    assert estimate(SIZES, GGUF, 2) == 2 * 1000 + 3400
    assert estimate({"plain": (1000, 2000)}, INT8, 2) == 1000
    assert estimate({"plain": (1000, 2000), "packed": (500, 500)}, INT8, 2) == 1500


def test_says_what_is_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), fwk.LLM(str(save_llama(tmp_path / "model")), max_total_tokens=256):
        pass
    assert any(message.startswith("weights will take about ") for message in caplog.messages)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_refuses_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = save_llama(tmp_path / "model") if kind == "safetensors" else gguf_twins("Q8_0", tmp_path).path
    monkeypatch.setattr(memory_need, "available_memory", lambda: 400 << 20)
    with pytest.raises(ConfigError, match=r"needs about 0\.0 GiB .* 0\.4 GiB of memory are free: "):
        fwk.LLM(str(path), max_total_tokens=256)


def test_no_room_for_a_kv_cache_is_told_with_all_the_numbers() -> None:
    mebi = 2**20
    settings: dict[str, Any] = {"max_total_tokens": None, "block_size": 16, "bytes_per_block": mebi, "most": 9}
    memory, use = MemoryInfo(300 * mebi, 1000 * mebi), MemoryUse(100 * mebi, 60 * mebi, 30 * mebi)

    def limit(fraction: float) -> MemoryLimit:
        return fraction_limit(fraction, memory.total)

    assert count_blocks(**settings, limit=limit(0.8), memory=memory) == 100
    assert count_blocks(**settings, limit=limit(0.8), memory=memory, use=use, num_null=1) == 9
    with pytest.raises(ConfigError) as caught:
        count_blocks(**settings, limit=limit(0.7), memory=memory, num_tables=2)
    assert str(caught.value) == (
        "--mem-fraction-static 0.7 of 1000 MiB is 700 MiB, but 700 MiB are in use and 300 MiB free: 0.00 MiB are left, "
        "and the smallest KV cache takes 2.00 MiB: raise it to 0.703 or more, or take a smaller model, or one in fewer "
        "bits"
    )
    assert count_blocks(**settings, limit=limit(0.703), memory=memory, num_tables=2) == 3
    with pytest.raises(ConfigError) as caught:
        count_blocks(**settings, limit=limit(0.7), memory=memory, use=use)
    assert str(caught.value) == (
        "--mem-fraction-static 0.7 of 1000 MiB is 700 MiB, but 700 MiB are in use (100 by others, 600 by weights and "
        "buffers) and 300 MiB free, of which 60 MiB for the largest step and 30 MiB for captured graphs must stay "
        "free: nothing is left, and the smallest KV cache takes 1.00 MiB: raise it to 0.792 or more, or lower "
        "--max-prefill-tokens, --max-running-requests or --cuda-graph-max-bs, or take a smaller model, or one in fewer "
        "bits"
    )
    assert count_blocks(**settings, limit=limit(0.792), memory=memory, use=use) == 2
    with pytest.raises(ConfigError, match=r"KV cache takes 1\.00 MiB: take a smaller model, or one in fewer bits"):
        count_blocks(**settings, limit=limit(0.9), memory=MemoryInfo(mebi // 2, 1000 * mebi))
    reserve = bytes_limit(-300 * mebi, 100 * mebi, memory.total)
    with pytest.raises(ConfigError, match=r"bytes -314572800 allows 700 of 1000 MiB, .*: make it -219152384 or more"):
        count_blocks(**settings, limit=reserve, memory=memory, use=use)
