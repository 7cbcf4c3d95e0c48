"""``fwk.LLM`` for many prompts and conversations, and ``fwk.AsyncLLM``."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, EngineDead, InvalidRequest
from fwk_process.progress import offline_bar

Tiny = Callable[..., fwk.LLM]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
PROMPTS = [[5 + i % 90, 7, 9 + i % 11] for i in range(40)]


def test_names_can_be_listed() -> None:
    assert set(dir(fwk)) == set(fwk.__all__)
    assert {"LLM", "AsyncLLM", "SamplingParams", "Completion"} <= set(dir(fwk))


def test_what_it_is_can_be_read(tiny_llm: Tiny) -> None:
    llm = tiny_llm()
    assert "generate" in repr(llm)
    assert "attention" in repr(llm)
    [done] = llm.generate([PROMPTS[0]], GREEDY)
    assert repr(done).startswith("Completion(")
    assert "3 tokens in, 6 out" in repr(done)
    assert len(repr(done)) < 200


def test_more_prompts_than_run_at_once_keep_their_order(tiny_llm: Tiny) -> None:
    llm = tiny_llm(max_running_requests=4)
    expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    most = 0
    step = llm.engine.step

    def counted() -> Any:
        nonlocal most
        stats = llm.engine.stats()
        most = max(most, stats.num_running + stats.num_waiting)
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]
    assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == expected
    assert 4 < most <= 8, "no more than twice as many as run are handed over"
    del llm.engine.step


def test_prompts_without_end_are_read_as_there_is_room(tiny_llm: Tiny) -> None:
    llm = tiny_llm(max_running_requests=2)
    num_read = 0

    def endless() -> Iterator[list[int]]:
        nonlocal num_read
        for i in itertools.count():
            num_read += 1
            yield PROMPTS[i % len(PROMPTS)]

    results = llm.generate_iter(endless(), GREEDY)
    found = [next(results)[0].token_ids for _ in range(10)]
    assert found == [done.token_ids for done in llm.generate(PROMPTS[:10], GREEDY)]
    assert num_read <= 10 + 4
    results.close()
    assert llm.engine.stats().num_running == llm.engine.stats().num_waiting == 0
    wrong = llm.generate_iter([PROMPTS[0], []], GREEDY)
    with pytest.raises(InvalidRequest):
        list(wrong)
    assert not llm.engine.has_work


def test_several_conversations(with_template: fwk.LLM) -> None:
    llm = with_template
    talks = [[{"role": "user", "content": text}] for text in ("a", "bb", "ccc")]
    together = llm.chat(talks, GREEDY)
    assert [done.token_ids for done in together] == [llm.chat(talk, GREEDY).token_ids for talk in talks]


@pytest.fixture
def with_template(tiny_llm: Tiny, tmp_path: Path) -> fwk.LLM:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    return tiny_llm(chat_template=str(template))


def test_a_bar_counts_prompts(capsys: pytest.CaptureFixture[str], tiny_llm: Tiny) -> None:
    llm = tiny_llm()
    llm.generate(PROMPTS[:5], GREEDY)
    assert capsys.readouterr().err == "", "nobody looks on"
    llm.generate(PROMPTS[:5], GREEDY, use_tqdm=True)
    assert "5/5" in capsys.readouterr().err
    with offline_bar("x", 1, None) as progress:
        progress.add()


@pytest.fixture
async def later(tiny_folder: Path) -> Any:
    llm = fwk.AsyncLLM(str(tiny_folder), load_format="dummy", max_running_requests=4, max_total_tokens=4096)
    yield llm
    await llm.close()


async def test_calls_that_run_at_once_give_what_they_give_alone(later: fwk.AsyncLLM, tiny_folder: Path) -> None:
    assert "is loading" in repr(later)
    found = await asyncio.gather(*(later.generate(prompt, GREEDY) for prompt in PROMPTS))
    pieces = [text async for text in later.stream(PROMPTS[3], GREEDY)]
    with fwk.LLM(str(tiny_folder), load_format="dummy", max_total_tokens=4096) as llm:
        assert [done.token_ids for [done] in found] == [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
        assert "".join(pieces) == llm.generate([PROMPTS[3]], GREEDY)[0].text
    assert "AsyncLLM(" in repr(later)
    several = await later.generate(PROMPTS[:3], GREEDY, n=2)
    assert [done.token_ids for done in several[::2]] == [found[i][0].token_ids for i in range(3)]


async def test_what_is_wrong_is_told_to_its_caller_alone(later: fwk.AsyncLLM) -> None:
    right = asyncio.ensure_future(later.generate(PROMPTS[0], GREEDY))
    with pytest.raises(InvalidRequest):
        await later.generate([[10**9]], GREEDY)
    with pytest.raises(InvalidRequest):
        async for _ in later.stream([], GREEDY):
            pass
    with pytest.raises(InvalidRequest, match="makes no embeddings"):
        await later.embed("x")
    assert len((await right)[0].token_ids) == 6


async def test_who_leaves_is_aborted(later: fwk.AsyncLLM) -> None:
    task = asyncio.ensure_future(later.generate(PROMPTS[0], LONG))
    stream = later.stream(PROMPTS[1], LONG)
    await anext(stream)
    task.cancel()
    await stream.aclose()  # type: ignore[attr-defined]
    with pytest.raises(asyncio.CancelledError):
        await task

    def stats(llm: fwk.LLM) -> int:
        return llm.engine.stats().num_running

    await later.generate(PROMPTS[2], GREEDY)
    assert await later._do(stats) == 0


async def test_the_end_and_a_start_that_fails(later: fwk.AsyncLLM) -> None:
    waiting = asyncio.ensure_future(later.generate(PROMPTS[0], LONG))
    await later.generate(PROMPTS[0], GREEDY)
    await later.close()
    with pytest.raises(EngineDead, match="closed"):
        await waiting
    with pytest.raises(EngineDead, match="closed"):
        await later.generate(PROMPTS[0], GREEDY)
    wrong = fwk.AsyncLLM("x", page_size=-3)
    for _ in range(2):
        with pytest.raises(ConfigError, match="page-size"):
            await wrong.generate("x")
    assert "failed to load" in repr(wrong)
    await wrong.close()
