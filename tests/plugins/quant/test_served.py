"""Served with each method, a tiny model gives the tokens of its twin with the de-quantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.quantised import (
    CHECKPOINTS,
    ONLINE,
    Twins,
    checkpoint_twins,
    gguf_twins,
    online_twins,
    twins_of,
)

import fwk
import fwk_native as native
from fwk import SamplingParams
from fwk.interfaces.declaration import Facts, Host
from fwk.plugins import discover, discovery, find
from fwk_quant.gguf import LAYOUTS

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
PROMPTS = [[72, 101, 108, 108, 111], [1, 2, 3] * 7, [250]]
LIMITS: dict[str, Any] = {"max_total_tokens": 512, "max_running_requests": 8}


def served(path: Path, **options: Any) -> tuple[list[fwk.Completion], str, list[str]]:
    with fwk.LLM(str(path), **LIMITS, **options) as llm:
        info = llm.engine.info
        return llm.generate(PROMPTS, GREEDY), info.chosen["quant"], info.reasons


def check(twins: Twins, chosen: str, **options: Any) -> list[str]:
    """The reasons given."""
    mine, name, reasons = served(twins.path, **twins.options, **options)
    plain, _, _ = served(twins.plain)
    assert name == chosen
    assert [done.token_ids for done in mine] == [done.token_ids for done in plain]
    for one, other in zip(mine, plain, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=2e-4)
    assert len({tuple(done.token_ids) for done in mine}) == len(PROMPTS)
    return reasons


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_with_scales(name: str, tmp_path: Path) -> None:
    assert check(checkpoint_twins(name, tmp_path), f"{CHECKPOINTS[name].method}, none") == []


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Older checkpoints have hf_quant_config.json, and nothing of it in config.json."""
    twins = checkpoint_twins("fp4-modelopt", tmp_path)
    config = json.loads((twins.path / "config.json").read_text())
    del config["quantization_config"]
    (twins.path / "config.json").write_text(json.dumps(config))
    stored = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (twins.path / "hf_quant_config.json").write_text(json.dumps(stored))
    assert check(twins, "fp4, none") == []


@pytest.mark.gate(2)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("method", ONLINE)
def test_quantised_while_loading(method: str, is_tied: bool, tmp_path: Path) -> None:
    assert check(online_twins(method, tmp_path, tie_word_embeddings=is_tied), method) == []


OTHERS = ["int4-gptq", "int8-compressed", "fp8", "fp4-modelopt", *(f"online-{name}" for name in ONLINE)]


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3", "deepseek_v2"])
def test_other_architectures(kind: str, name: str, tmp_path: Path) -> None:
    """Experts in the run's format; windows; MLA, whose matrix of all heads is unpacked, or stays plain."""
    make_checkpoint(tmp_path / "source", kind)
    method = name.removeprefix("online-").split("-")[0]
    check(twins_of(tmp_path / "source", name, tmp_path), method if "online" in name else f"{method}, none")


SLOW = [pytest.param(name, marks=pytest.mark.sweep) for name in ("online-int8", "gguf")]


@pytest.mark.parametrize("name", ["int4-gptq", *SLOW])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    """What is quantised while loading is the same for any number of ranks."""
    if name == "gguf":
        twins = gguf_twins("Q8_0", tmp_path)
    else:
        twins = online_twins("int8", tmp_path) if "online" in name else checkpoint_twins(name, tmp_path)
    mine, _, _ = served(twins.path, **twins.options, tensor_parallel_size=2)
    plain, _, _ = served(twins.plain)
    assert [done.token_ids for done in mine] == [done.token_ids for done in plain]


@pytest.mark.parametrize(
    ("device", "dtype", "instructions", "why"),
    [
        ("cpu", "bfloat16", "avx2", None),
        ("cpu", "bfloat16", "avx512", None),
        ("cpu", "bfloat16", "amx", "multiplies many tokens more slowly than AMX"),
        ("cpu", "float32", "avx512", "unpacks blocks for each product"),
        ("cuda", "bfloat16", "avx512", "unpacks blocks for each product"),
    ],
)
def test_auto_keeps_gguf_blocks_where_that_is_faster(
    device: str, dtype: str, instructions: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fwk_native.isa", lambda: instructions)
    monkeypatch.setattr("fwk_native.refusal", lambda: None)
    spec = find(discover(), "quant", "gguf").declaration
    found = spec.auto_skip_reason(Facts(host=Host(device), dtype=dtype, layouts=("gguf:Q4_K", "plain")))
    assert found is None if why is None else why in (found or "")


@pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")
def test_auto_takes_blocks_or_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fwk_native.has_tiles", lambda instructions: False)
    path = gguf_twins("Q8_0", tmp_path).path
    assert served(path, dtype="bfloat16")[1:] == ("gguf", [])
    assert served(path, dtype="bfloat16", quantization="none")[1] == "none"
    _, name, reasons = served(path, dtype="float32")
    assert name == "none"
    assert any("unpacks blocks for each product" in reason for reason in reasons)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.mark.gate(2)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
)
def test_gguf_blocks(kind: str, is_tied: bool, tmp_path: Path) -> None:
    changes = WIDE if kind.endswith(("K", "XS")) else {}
    assert check(gguf_twins(kind, tmp_path, tie_word_embeddings=is_tied, **changes), "gguf") == []


def test_parts_of_other_types_are_computed_apart_and_unread_ones_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in real files: V in more bits than Q and K. Q5_0 is made one that is not read packed, F16 is plain anyway."""
    entry_points = discovery.entry_points
    monkeypatch.setattr(discovery, "entry_points", lambda **group: entry_points(**group))  # declarations are made anew
    monkeypatch.setattr("fwk_quant.gguf.LAYOUTS", tuple(name for name in LAYOUTS if name != "gguf:Q5_0"))
    types = {
        "v_proj": "Q6_K",
        "up_proj": "Q5_0",
        "o_proj": "F16",
        "embed_tokens": "Q5_K",
        "lm_head": "Q6_K",
        "*": "Q4_K",
    }
    reasons = check(gguf_twins(types, tmp_path, **WIDE), "gguf, none")
    (reason,) = [reason for reason in reasons if "quantizer" in reason]
    assert reason == "quantizer 'gguf' does not read gguf:Q5_0: 1 layers are computed unpacked, as plain weights"
    from fwk.errors import PluginError

    with pytest.raises(PluginError, match=r"--strict: .*gguf:Q5_0"):
        served(tmp_path / "model.gguf", quantization="gguf", dtype="float32", strict=True)


def test_gguf_is_plain_by_default(tmp_path: Path) -> None:
    twins = gguf_twins("Q8_0", tmp_path)
    assert served(twins.path, dtype="float32")[1] == "none"
