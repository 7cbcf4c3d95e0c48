"""Adapters through the whole engine: every output is that of the checkpoint peft merged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from tests.helpers.lora_adapters import ADAPTERS
from tests.helpers.scripted_decoder import EchoDecoder, EchoPlugin

import fwk
from fwk import SamplingParams
from fwk.errors import InvalidRequest, RequestFailed
from fwk.plugins import discover
from fwk.types import Request, cache_namespace
from fwk_lora.feature import Adapted
from fwk_lora.feature.engine import Adapters
from fwk_lora.torch_lora.backend import TorchLoRA

Serve = Callable[..., fwk.LLM]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 40, 1, 90, 16)]
NAMES = ["", *ADAPTERS]
ALL = tuple(ADAPTERS)


def adapters_of(llm: fwk.LLM) -> Adapters:
    """The books of the engine's part."""
    [part] = [part for part in llm.engine.scheduler.parts.all if part.name == "lora"]
    return part.adapters  # type: ignore[attr-defined]


def ids(done: list[fwk.Completion]) -> list[list[int]]:
    return [one.token_ids for one in done]


@pytest.fixture(scope="module")
def expected(serve: Serve) -> dict[str, list[list[int]]]:
    """What the merged checkpoints say, one request at a time."""
    plain = {"prefix_cache": "none", "max_running_requests": 1}
    return {n: ids(serve(f"{n}-merged" if n else "base", **plain).generate(PROMPTS, GREEDY)) for n in NAMES}


@pytest.mark.sweep
def test_adapters_say_different_things(expected: dict[str, list[list[int]]]) -> None:
    assert len({repr(outputs) for outputs in expected.values()}) == len(NAMES)


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7, "max_prefill_tokens": 20},
        {"max_total_tokens": 224, "page_size": 4},  # forces pre-emption
        {"max_loras_per_batch": 1},
        {"max_loras_per_batch": 2, "max_running_requests": 3},
        {"prefix_cache": "none", "schedule_policy": "lpm"},
        {"max_loras_per_batch": 2, "executor": "threaded"},
    ],
    ids=str,
)
def test_mixed_requests_are_each_its_merged_model(
    serve: Serve, expected: dict[str, list[list[int]]], options: dict[str, Any]
) -> None:
    llm = serve(adapters=ALL, **options)
    prompts = [prompt for prompt in PROMPTS for _ in NAMES]
    wanted = [expected[name][i] for i in range(len(PROMPTS)) for name in NAMES]
    for _ in range(2):  # the second time from the cache
        assert ids(llm.generate(prompts, GREEDY, adapter=NAMES * len(PROMPTS))) == wanted
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)
    if options.get("max_total_tokens"):
        assert stats.preemptions > 0


def test_the_cache_keeps_adapters_and_salts_apart(serve: Serve, expected: dict[str, list[list[int]]]) -> None:
    llm = serve(adapters=ALL, page_size=8)
    for _ in range(2):
        for name in NAMES:
            [done] = llm.generate([PROMPTS[4]], GREEDY, adapter=name)
            assert done.token_ids == expected[name][4]
    assert [llm.generate([PROMPTS[4]], GREEDY, adapter=name)[0].cached_tokens for name in NAMES] == [88] * len(NAMES)
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("a\0", ""), ("a\0a", ""), ("\0a", ""), ("\0", "a")]
    assert len({cache_namespace(salt, key) for salt, key in pairs}) == len(pairs)


def test_several_completions(serve: Serve) -> None:
    sampling = SamplingParams(max_tokens=10, temperature=1.0, seed=3, ignore_eos=True)
    found = serve(adapters=ALL).generate(PROMPTS[:2], sampling, n=3, adapter=["wide", "narrow"])
    for i, name in enumerate(("wide", "narrow")):
        wanted = serve(f"{name}-merged").generate([PROMPTS[i]], sampling, n=3)
        assert ids(found[3 * i : 3 * i + 3]) == ids(wanted)


def test_prompt_logprobs(serve: Serve) -> None:
    sampling = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    [done] = serve(adapters=ALL, chunked_prefill_size=7).generate([PROMPTS[2]], sampling, adapter="odd")
    [wanted] = serve("odd-merged").generate([PROMPTS[2]], sampling)
    assert done.prompt_logprobs is not None
    assert wanted.prompt_logprobs is not None
    for one, other in zip(done.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
        assert one is not None
        assert other is not None
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_verified_drafts(folders: Path, expected: dict[str, list[list[int]]]) -> None:
    """Drafts are a sequence's tokens like others: its adapter goes for each of them."""
    plugins = discover()
    plugins.register(EchoPlugin(), "speculative.echo", "tests", "1")
    options: dict[str, Any] = {"max_total_tokens": 4096, "max_running_requests": 8, "check_blocks": True}
    paths = [f"{name}={folders / name}" for name in ADAPTERS]
    with fwk.LLM(
        str(folders / "base"),
        plugins=plugins,
        speculative_algorithm="echo",
        enable_lora=True,
        lora_paths=paths,
        **options,
    ) as llm:
        prompts = [prompt for prompt in PROMPTS for _ in NAMES]
        wanted = [expected[name][i] for i in range(len(PROMPTS)) for name in NAMES]
        assert ids(llm.generate(prompts, GREEDY, adapter=NAMES * len(PROMPTS))) == wanted
    assert any(drafts > accepted for drafts, accepted in EchoDecoder.verified)


@pytest.fixture
def fresh(folders: Path) -> Any:
    made: list[fwk.LLM] = []

    def make(**options: Any) -> fwk.LLM:
        settings = {"max_total_tokens": 4096, "max_running_requests": 8, "check_blocks": True, "enable_lora": True}
        made.append(fwk.LLM(str(folders / "base"), **{**settings, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_load_and_unload(fresh: Serve, folders: Path, expected: dict[str, list[list[int]]]) -> None:
    llm = fresh(max_loras_per_batch=2, max_loaded_loras=3)
    with pytest.raises(InvalidRequest, match="no LoRA adapter 'wide' is loaded"):
        llm.generate([PROMPTS[0]], GREEDY, adapter="wide")
    for name in ALL[:3]:
        info = llm.load_adapter(name, str(folders / name))
        assert (info.name, info.rank) == (name, {"narrow": 4, "wide": 8, "odd": 6}[name])
        assert ids(llm.generate(PROMPTS, GREEDY, adapter=name)) == expected[name]
    with pytest.raises(InvalidRequest, match=r"3 LoRA adapters are loaded, as many as --max-loaded-loras"):
        llm.load_adapter("last", str(folders / "last"))
    with pytest.raises(InvalidRequest, match="'wide' is loaded already; unload it first"):
        llm.load_adapter("wide", str(folders / "wide"))
    llm.unload_adapter("wide")
    with pytest.raises(InvalidRequest, match="no LoRA adapter 'wide' is loaded"):
        llm.generate([PROMPTS[0]], GREEDY, adapter="wide")
    with pytest.raises(InvalidRequest, match="no LoRA adapter 'wide' is loaded"):
        llm.unload_adapter("wide")
    llm.load_adapter("last", str(folders / "last"))
    assert ids(llm.generate(PROMPTS, GREEDY, adapter="last")) == expected["last"]
    assert ids(llm.generate(PROMPTS, GREEDY, adapter="narrow")) == expected["narrow"]
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected[""]


def test_a_name_with_new_weights_finds_no_old_entries(
    fresh: Serve, folders: Path, expected: dict[str, list[list[int]]]
) -> None:
    llm = fresh(page_size=8)
    cached = []
    for name in ("narrow", "wide", "narrow"):
        llm.load_adapter("mine", str(folders / name))
        [done] = llm.generate([PROMPTS[4]], GREEDY, adapter="mine")
        assert done.token_ids == expected[name][4]
        cached.append(done.cached_tokens)
        llm.unload_adapter("mine")
    assert cached == [0, 0, 88]  # the same weights again: their K/V are still good


def test_the_settings_are_part_of_the_content(fresh: Serve, folders: Path, tmp_path: Path) -> None:
    """The same tensors with another alpha are another adapter."""
    shutil.copytree(folders / "narrow", tmp_path / "other")
    text = (tmp_path / "other/adapter_config.json").read_text()
    (tmp_path / "other/adapter_config.json").write_text(text.replace('"lora_alpha": 16', '"lora_alpha": 32'))
    llm = fresh()
    one = llm.load_adapter("one", str(folders / "narrow"))
    llm.unload_adapter("one")
    assert llm.load_adapter("one", str(tmp_path / "other")).key != one.key


def test_requests_under_way_finish_on_an_unloaded_adapter(
    fresh: Serve, folders: Path, expected: dict[str, list[list[int]]]
) -> None:
    """Its slot and its weights stay until the last of them ends, and a new one of its name is another."""
    llm = fresh(max_loras_per_batch=1, max_running_requests=2)
    info = llm.load_adapter("mine", str(folders / "wide"))
    following = {
        key: entry
        for item in llm.inputs(PROMPTS[:4], GREEDY, 1, adapter="mine")
        for key, entry in llm.submit(item).items()
    }
    open_ = set(following)
    for event in llm.engine.step():
        llm._take(event, following, open_)
    assert llm.engine.stats().num_waiting > 0
    llm.unload_adapter("mine")
    assert info.key in adapters_of(llm)._by_key
    newer = llm.load_adapter("mine", str(folders / "narrow"))
    later = llm.generate(PROMPTS[:4], GREEDY, adapter="mine")  # steps the others to their end, too
    assert ids(later) == expected["narrow"][:4]
    assert info.key not in adapters_of(llm)._by_key
    worker = llm.engine.executor._worker  # type: ignore[attr-defined]
    [part] = [part for part in worker._parts.features._parts if part.context.name == "lora"]
    assert list(part.store._loaded) == [newer.key]


def test_an_unloaded_adapter_comes_back_while_in_use(fresh: Serve, folders: Path) -> None:
    llm = fresh()
    info = llm.load_adapter("mine", str(folders / "wide"))
    stream = llm.stream(PROMPTS[0], GREEDY, adapter="mine")
    next(stream)
    llm.unload_adapter("mine")
    assert llm.load_adapter("mine", str(folders / "wide")) == info
    assert len(list(stream)) > 0
    assert llm.generate([PROMPTS[0]], GREEDY, adapter="mine")


def test_a_request_that_comes_after_the_unload_fails_alone(fresh: Serve, folders: Path) -> None:
    """The race of a server: checked at the door, unloaded before it reached the engine."""
    llm = fresh()
    key = llm.load_adapter("mine", str(folders / "wide")).key
    asked = {"lora": msgspec.Raw(msgspec.msgpack.encode(Adapted(key)))}
    request = Request(request_id="late", prompt_token_ids=[5], sampling=GREEDY, features=asked)
    llm.unload_adapter("mine")
    [event] = llm.engine.add(request)
    assert event.error == "the LoRA adapter 'mine' is not loaded"
    assert llm.engine.stats().num_waiting == 0


@pytest.mark.sweep
async def test_the_engine_that_is_awaited_has_it_too(folders: Path, expected: dict[str, list[list[int]]]) -> None:
    async with fwk.AsyncLLM(str(folders / "base"), max_total_tokens=4096, enable_lora=True) as llm:
        info = await llm.load_adapter("mine", str(folders / "wide"))
        assert info.rank == 8
        assert ids(await llm.generate(PROMPTS[:2], GREEDY, adapter=["mine", ""])) == [
            expected["wide"][0],
            expected[""][1],
        ]
        with pytest.raises(TypeError, match="unexpected keyword argument 'adaptor'"):
            await llm.generate(PROMPTS[:1], GREEDY, adaptor="mine")
        with pytest.raises(InvalidRequest, match="2 prompts, but 1 of adapter"):
            await llm.generate(PROMPTS[:2], GREEDY, adapter=["mine"])
        with pytest.raises(TypeError):
            await llm.load_adapter("mine")
        await llm.unload_adapter("mine")
        assert not hasattr(llm, "load_adaptor")
        assert ids(await llm.generate(PROMPTS[:1], GREEDY)) == expected[""][:1]


def test_beams_of_an_adapter_are_those_of_its_merged_model(serve: Serve) -> None:
    [found] = serve(adapters=ALL).beam_search([PROMPTS[0]], 3, 6, n=2, adapter="wide")
    [wanted] = serve("wide-merged", prefix_cache="none", max_running_requests=1).beam_search([PROMPTS[0]], 3, 6, n=2)
    assert ids(found) == ids(wanted)


def test_lora_off(serve: Serve, folders: Path) -> None:
    llm = serve(prefix_cache="none", max_running_requests=1)
    with pytest.raises(InvalidRequest, match="load_adapter needs the feature 'lora': start with --enable-lora"):
        llm.load_adapter("wide", str(folders / "wide"))
    with pytest.raises(InvalidRequest, match="adapter needs the feature 'lora': start with --enable-lora"):
        llm.generate([PROMPTS[0]], GREEDY, adapter="wide")


def test_stored_in_other_precisions(fresh: Serve, folders: Path, tmp_path: Path) -> None:
    """Half-precision files are what training mostly writes."""
    shutil.copytree(folders / "narrow", tmp_path / "half")
    tensors = load_file(folders / "narrow/adapter_model.safetensors")
    save_file(
        {n: t.bfloat16().float().bfloat16() for n, t in tensors.items()}, tmp_path / "half/adapter_model.safetensors"
    )
    shutil.copytree(tmp_path / "half", tmp_path / "whole")
    save_file({n: t.bfloat16().float() for n, t in tensors.items()}, tmp_path / "whole/adapter_model.safetensors")
    llm = fresh()
    for name in ("half", "whole"):
        llm.load_adapter(name, str(tmp_path / name))
    one, other = (llm.generate(PROMPTS, GREEDY, adapter=name) for name in ("half", "whole"))
    assert ids(one) == ids(other)


def test_a_file_that_is_too_large_is_not_read(fresh: Serve, folders: Path) -> None:
    size = (folders / "narrow/adapter_model.safetensors").stat().st_size
    fresh(max_lora_model_size=size).load_adapter("fits", str(folders / "narrow"))
    with pytest.raises(InvalidRequest, match=f"has {size} bytes, more than --max-lora-model-size {size - 1}"):
        fresh(max_lora_model_size=size - 1).load_adapter("large", str(folders / "narrow"))


def test_what_does_not_fit_ends_the_request_in_the_backends_name(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = TorchLoRA.apply
    spoils: list[Callable[[Any], Any]] = []

    def wrong(self: Any, y: Any, x: Any, layer: Any) -> Any:
        answer = apply(self, y, x, layer)
        return spoils.pop()(answer) if spoils else answer

    monkeypatch.setattr(TorchLoRA, "apply", wrong)
    llm = serve(adapters=ALL, lora_backend="torch", disable_cuda_graph=True)
    for spoil in (lambda y: y[:, :0], lambda y: y.repeat(2, 1), lambda y: y.repeat(1, 2), lambda y: y.bool()):  # type: ignore[misc]
        spoils.append(spoil)
        with pytest.raises(RequestFailed, match=r"LoRA backend 'torch' .* in apply"):
            llm.generate([PROMPTS[1]], GREEDY, adapter=ALL[0])
        assert len(ids(llm.generate([PROMPTS[1]], GREEDY, adapter=ALL[0]))[0]) == 16
