"""--enable-deterministic-inference on a pretended device: Triton's kernels, whose bits nothing alongside changes."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.interpreted import interpreted
from tests.helpers.pretend_cuda import JOURNAL, pretended, triton_kernels
from tests.helpers.pretend_cuda.tensors import DEVICE
from tests.helpers.tiny import routed_in_float32

import fwk
from fwk import SamplingParams
from fwk.errors import FwkError
from fwk.interfaces.declaration import Facts, Host
from fwk.interfaces.logprobs import packed_logprobs, unpacked_logprobs
from fwk.plugins import discover, negotiate
from fwk_attention.triton_paged import plan
from fwk_kit.testing.serving import MIXTURE, TINY
from fwk_loaders.dummy import weights

pytestmark = [
    pytest.mark.usefixtures("same_rows"),
    interpreted,
]

PROMPT = [(7 * i) % 250 + 5 for i in range(30)]
OTHER = [(11 * i) % 250 + 5 for i in range(10)]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_total_tokens": 128,
    "max_prefill_tokens": 42,
    "chunked_prefill_size": 32,  # the largest step is computed beforehand, to see what memory it takes
    "max_running_requests": 2,
    "cuda_graph_bs": (2,),  # one that is alone is padded
    "enable_deterministic_inference": True,
    "attention_backend": "triton",
    "triton_attention_split_tile_size": 16,
    "operator_backend": "triton",
    "sampling_backend": "triton",
    "dtype": "bfloat16",
}
WAYS: dict[str, dict[str, Any]] = {
    "in uneven chunks alongside another": {"chunked_prefill_size": 13, "max_prefill_tokens": 20},
    "from the prefix cache": {},
    "in chunks of few rows": {"chunked_prefill_size": 7, "disable_cuda_graph": True},
    "with drafts": {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 1},
}
WINDOWS = {**TINY, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bfloat16": (TINY, {}),
    "float32": (TINY, {"dtype": "float32"}),
    "fp8 K/V": (TINY, {"kv_cache_dtype": "fp8"}),
    "experts": (MIXTURE, {"moe_runner_backend": "triton"}),
    "a router in float32": (routed_in_float32(MIXTURE), {"moe_runner_backend": "triton"}),
}
HARDEST = "in uneven chunks alongside another"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name, (config, _) in RUNS.items():
        found[name] = tmp_path_factory.mktemp("deterministic") / name.replace("/", "")
        found[name].mkdir()
        (found[name] / "config.json").write_text(json.dumps(config))
    return found


def bits(folder: Path, way: str, **options: Any) -> list[tuple[int, float]]:
    """A request's tokens and log-probabilities."""
    few = dict.fromkeys(PROMPT[3:6], 30.0)  # of which n-grams foretell some
    drawn: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "ignore_eos": True, "logit_bias": few}
    asked = SamplingParams(max_tokens=5, logprobs=1, **drawn)
    settings: dict[str, Any] = OPTIONS | options
    if settings.get("disable_cuda_graph"):
        del settings["cuda_graph_bs"]
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(weights, "STD", 0.25)  # so large that attention's last bits reach the logits
        stack.enter_context(triton_kernels())
        plugins = stack.enter_context(pretended())
        llm = stack.enter_context(fwk.LLM(str(folder), plugins=plugins, device="pretended", **settings))
        if "cache" in way:
            llm.generate([PROMPT[:24]], SamplingParams(max_tokens=1))
        JOURNAL.clear()
        done = llm.generate([PROMPT, OTHER] if "another" in way else [PROMPT], asked)[0]
        assert (done.cached_tokens > 0) == ("cache" in way)
        assert (done.accepted_draft_tokens > 0) == ("drafts" in way)
        assert (JOURNAL.launches["graph"] > 0) == (not settings.get("disable_cuda_graph"))
        assert JOURNAL.launches["linear_tiles"] > 0
    assert JOURNAL.faults == []
    return [(entry.token_id, entry.logprob) for entry in done.logprobs or []]


@cache
def alone(folder: Path, options: str) -> list[tuple[int, float]]:
    """Whole, and operator by operator."""
    return bits(folder, "", **json.loads(options), disable_cuda_graph=True)


@pytest.mark.sweep
def test_the_bits_are_the_same(folders: dict[str, Path]) -> None:
    """Quickly: without graphs, whose captures take the interpreter most of the time."""
    options = {"dtype": "float32"}
    found = bits(folders["float32"], HARDEST, **WAYS[HARDEST], **options, disable_cuda_graph=True)
    assert found == alone(folders["float32"], json.dumps(options))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("run", "way"), [*(("bfloat16", way) for way in WAYS), *((run, HARDEST) for run in RUNS if run != "bfloat16")]
)
def test_the_bits_are_the_same_in_every_way(folders: dict[str, Path], run: str, way: str) -> None:
    options = RUNS[run][1]
    wanted = alone(folders[run], json.dumps(options))
    assert len(wanted) == 5
    assert bits(folders[run], way, **options | WAYS[way]) == wanted


@pytest.mark.sweep
def test_parts_by_neighbours_are_noticed(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual number of parts: as many as fill a device, and so fewer of each sequence where there are several."""
    real = plan.cut

    def by_neighbours(chosen: Any, *arrays: Any, split: int, **more: Any) -> Any:
        return real(chosen, *arrays, split=split * len(chosen), **more)

    monkeypatch.setattr(plan, "cut", by_neighbours)
    options = {"dtype": "float32", "disable_cuda_graph": True}
    assert bits(folders["float32"], "alongside another", **options) != bits(folders["float32"], "", **options)


def test_log_probabilities_of_an_odd_vocabulary() -> None:
    """On a device its rows are made longer, so that each begins where 16 bytes do."""
    logits = torch.randn(3, 37, generator=torch.Generator().manual_seed(0))
    token_ids = torch.tensor([0, 36, 5])
    with pretended():
        found = packed_logprobs(logits.to(DEVICE), token_ids.to(DEVICE), 37).cpu()
    assert torch.equal(found[:, 1:2], packed_logprobs(logits, token_ids, 37)[:, 1:2])
    (mine, wanted) = (
        [entry.top for entry in unpacked_logprobs(packed, token_ids.tolist(), [37] * 3)]
        for packed in (found, packed_logprobs(logits, token_ids, 37))
    )
    for some, others in zip(mine, wanted, strict=True):
        assert [token for token, _ in some] == [token for token, _ in others]
        assert [number for _, number in some] == pytest.approx([number for _, number in others], abs=1e-6)


CANNOT = r"does not promise the same numbers whatever is computed alongside \(--enable-deterministic-inference\)"


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        (TINY, {"attention_backend": "torch"}, rf"'torch' .* {CANNOT}; of its family cpu and triton can"),
        (TINY, {"operator_backend": "torch"}, rf"'torch' .* {CANNOT}; of its family cpu and triton can"),
        (MIXTURE, {"moe_runner_backend": "torch"}, rf"'torch' .* {CANNOT}; of its family cpu and triton can"),
        (TINY, {"quantization": "int8"}, "by its native kernels only, which run on a CPU, not on pretended"),
        (TINY, {"quantization": "fp8"}, rf"'fp8' .* {CANNOT}"),
        (TINY, {"enable_lora": True}, f"{CANNOT}; of its family none can"),
        (
            TINY,
            {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 2},
            "they hold for drafts in chains",
        ),
        (WINDOWS, {}, "reads a window's keys from the first that any token of a chunk sees"),
    ],
)
def test_what_does_not_hold_it_is_refused(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with triton_kernels(), pretended() as plugins, pytest.raises(FwkError, match=why):
        fwk.LLM(str(tmp_path), plugins=plugins, device="pretended", **OPTIONS | options)


def test_auto_takes_what_holds_it() -> None:
    """As ``--device cuda --enable-deterministic-inference`` alone would."""
    facts = Facts(Host("cuda", (9, 0)), "bfloat16", layouts=("plain",), is_deterministic=True)
    wanted = dict.fromkeys(("quant", "attention", "moe", "operators"), "auto")
    found = negotiate(discover(), wanted, facts, {})
    assert found.chosen == {"quant": "none", "attention": "triton", "moe": "triton", "operators": "triton"}
