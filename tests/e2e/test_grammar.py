"""Constrained output through the whole engine: it validates, it composes, and nobody waits for a compiler."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import fwk
from fwk import GrammarRequest, SamplingParams
from fwk.errors import ConfigError, InvalidRequest, PluginError
from fwk.plugins import discover
from fwk.types import Request
from tests.helpers.grammars import JUDGED, GrammarTestPlugins, SlowBackend
from tests.helpers.scripted_decoder import EchoDecoder, EchoPlugin

PROMPTS = [[7, 8, 9] * 6, [5] * 20, list(range(10, 50)), [100, 101, 100, 101, 100]]
JSON = {"constrained_json_whitespace_pattern": " ?"}
END = 258
MAX_TOKENS = 60
NAMED = "grammar backend 'slow' (tests 1) raised RuntimeError in fill_mask"


def settings(num: int, names: list[str], **given: Any) -> list[SamplingParams]:
    """``num`` sequences, each with its own seed and one of the grammars in turn."""
    given = {"max_tokens": MAX_TOKENS, **given}
    return [
        SamplingParams(seed=100 + i, grammar=JUDGED[names[i % len(names)]][0], **given) for i in range(num)
    ]  # fmt: skip


@pytest.fixture
def make(tiny_folder: Path) -> Iterator[Callable[..., fwk.LLM]]:
    """Engines with the test's own plugins alongside the installed ones."""
    made: list[fwk.LLM] = []

    def make(**options: Any) -> fwk.LLM:
        plugins = discover()
        plugins.register(EchoPlugin(), "speculative.echo", "tests", "1")
        plugins.register(GrammarTestPlugins(), "grammar.slow", "tests", "1")
        given = {"max_total_tokens": 4096, "max_running_requests": 32, "check_blocks": True, **options}
        made.append(fwk.LLM(str(tiny_folder), load_format="dummy", plugins=plugins, **given))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
        assert (llm.engine.stats().num_running, llm.engine.stats().num_held_blocks) == (0, 0)


@pytest.mark.gate(6)
@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_every_output_is_what_its_grammar_says(tiny_llm: Callable[..., fwk.LLM], name: str, temperature: float) -> None:
    judge = JUDGED[name][1]
    sampling = settings(24, [name], temperature=temperature, max_tokens=120)
    outputs = tiny_llm(**JSON).generate([PROMPTS[i % 4] for i in range(24)], sampling)
    ended = [done for done in outputs if done.finish_reason == "stop"]
    assert len(ended) >= (4 if name == "object" else 12)
    for done in ended:
        assert judge(done.text)
        assert "\ufffd" not in done.text


def plain_and_other(
    make: Callable[..., fwk.LLM], sampling: list[SamplingParams], **options: Any
) -> tuple[fwk.LLM, list[fwk.Completion]]:
    """Run on a plain engine and on another one: everything told is the same."""
    prompts = [PROMPTS[i % 4] for i in range(len(sampling))]
    plain = make(**JSON, disable_jump_forward=True).generate(prompts, sampling)
    other = make(**JSON, **options)
    outputs = other.generate(prompts, sampling)
    for one, two in zip(plain, outputs, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (two.text, two.token_ids, two.finish_reason)
        assert len(one.logprobs or []) == len(two.logprobs or [])
    return other, plain


MIXED = [*JUDGED]


@pytest.mark.gate(1)
@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 1}, {"ignore_eos": True}])
@pytest.mark.parametrize("options", [{}, {"max_total_tokens": 160, "page_size": 4, "chunked_prefill_size": 9}])
def test_drafts_change_nothing(make: Callable[..., fwk.LLM], given: dict[str, Any], options: dict[str, Any]) -> None:
    sampling = settings(14, MIXED, **given)
    plain_and_other(make, sampling, speculative_algorithm="echo", **options)
    assert sum(accepted for _, accepted in EchoDecoder.verified) > 0
    assert any(accepted < drafts for drafts, accepted in EchoDecoder.verified)


@pytest.mark.gate(1)
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 1}, {"ignore_eos": True}])
@pytest.mark.parametrize("executor", ["inprocess", "threaded"])
def test_forced_tokens_change_nothing_but_the_number_of_steps(
    make: Callable[..., fwk.LLM], given: dict[str, Any], backend: str, executor: str
) -> None:
    sampling = settings(6, ["schema", "choice"], **given)
    prompts = [PROMPTS[i % 4] for i in range(6)]
    found: list[list[tuple[list[int], int]]] = []
    steps: list[int] = []
    for off in (True, False):
        options = JSON if backend == "llguidance" else {"constrained_json_disable_any_whitespace": True}
        llm = make(**options, grammar_backend=backend, executor=executor, disable_jump_forward=off)
        done = llm.generate(prompts, sampling)
        found.append([(one.token_ids, len(one.logprobs or [])) for one in done])
        stats = llm.engine.stats()
        steps.append(stats.steps)
        assert (stats.draft_tokens > 0) == (not off)
    assert found[0] == found[1]
    # Of bytes there is one way to write a text; the last one of an output is no draft that another token follows.
    assert stats.draft_tokens - stats.accepted_draft_tokens <= len(prompts)
    assert steps[1] < steps[0]


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "options",
    [{"speculative_algorithm": "echo"}, {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3}],
)
def test_forced_tokens_are_told_to_no_decoder(make: Callable[..., fwk.LLM], options: dict[str, Any]) -> None:
    """They are no merit of its drafts."""
    sampling = settings(6, ["schema", "choice"], temperature=0.0)
    before = len(EchoDecoder.verified)
    other, _ = plain_and_other(make, sampling, **options)
    assert other.engine.stats().accepted_draft_tokens > sum(accepted for _, accepted in EchoDecoder.verified[before:])


@pytest.mark.sweep
@pytest.mark.parametrize("breadth", [1, 3])
@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1.0, "ignore_eos": True}])
def test_trees_of_drafts_change_nothing(make: Callable[..., fwk.LLM], given: dict[str, Any], breadth: int) -> None:
    sampling = settings(14, MIXED, **given)
    plain_and_other(make, sampling, speculative_algorithm="ngram", speculative_ngram_max_bfs_breadth=breadth)


@pytest.mark.sweep
def test_every_rank_keeps_to_the_grammar(make: Callable[..., fwk.LLM], tiny_folder: Path) -> None:
    sampling = settings(7, MIXED, temperature=0.0)
    prompts = [PROMPTS[i % 4] for i in range(7)]
    plain = make(**JSON).generate(prompts, sampling)
    options = {"executor": "processes", "tp_size": 2, "max_total_tokens": 4096, **JSON}
    with fwk.LLM(str(tiny_folder), load_format="dummy", **options) as llm:
        assert [done.token_ids for done in llm.generate(prompts, sampling)] == [done.token_ids for done in plain]


@pytest.mark.gate(1)
@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1.0}, {"ignore_eos": True}])
def test_overlap_changes_nothing(make: Callable[..., fwk.LLM], given: dict[str, Any]) -> None:
    plain_and_other(make, settings(14, MIXED, **given), executor="threaded")
    plain_and_other(make, settings(14, MIXED, **given), executor="threaded", speculative_algorithm="echo")


def test_a_sequence_that_was_pre_empted_goes_on_in_its_grammar(make: Callable[..., fwk.LLM]) -> None:
    other, _ = plain_and_other(make, settings(14, MIXED), max_total_tokens=128, page_size=4, chunked_prefill_size=7)
    assert other.engine.stats().preemptions > 0


def test_the_others_of_a_batch_do_not_notice(tiny_llm: Callable[..., fwk.LLM]) -> None:
    llm = tiny_llm(**JSON)
    free = [SamplingParams(max_tokens=30, seed=i, temperature=0.8, ignore_eos=True) for i in range(4)]
    alone = llm.generate(PROMPTS, free)
    constrained = settings(4, MIXED[2:6])
    together = llm.generate([*PROMPTS, *PROMPTS], [*free, *constrained])
    assert [done.token_ids for done in together[:4]] == [done.token_ids for done in alone]
    assert [d.token_ids for d in together[4:]] == [d.token_ids for d in llm.generate(PROMPTS, constrained)]


def test_choices_of_one_request_have_a_state_each(tiny_llm: Callable[..., fwk.LLM]) -> None:
    sampling = SamplingParams(max_tokens=20, seed=5, grammar=GrammarRequest("regex", "[0-9]{4}[a-z]{3}"))
    outputs = tiny_llm().generate([PROMPTS[0]], sampling, n=5)
    assert len({done.text for done in outputs}) > 1
    for done in outputs:
        assert (len(done.text), done.finish_reason) == (7, "stop")
        assert done.text[:4].isdigit()
        assert done.text[4:].isalpha()


def test_logprobs_are_those_of_the_model_not_of_the_mask(tiny_llm: Callable[..., fwk.LLM]) -> None:
    llm = tiny_llm()
    greedy = SamplingParams(
        max_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True, allowed_token_ids=list(range(97, 123))
    )
    free = llm.generate([PROMPTS[0]], greedy)[0]
    grammar = GrammarRequest("choice", json.dumps([free.text]))
    bound = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=20, temperature=0.0, logprobs=3, grammar=grammar))[0]
    assert (bound.text, bound.finish_reason) == (free.text, "stop")
    assert free.logprobs is not None
    assert bound.logprobs is not None
    for one, two in zip(free.logprobs, bound.logprobs, strict=True):
        assert one.token_id == two.token_id
        assert one.logprob == pytest.approx(two.logprob, abs=1e-5)
        assert one.rank == two.rank > 0
        assert [token for token, _ in one.top] == [token for token, _ in two.top]
    assert any(entry.rank > 1 for entry in bound.logprobs)


def test_a_complete_output_ends_whatever_else_was_asked(tiny_llm: Callable[..., fwk.LLM]) -> None:
    llm = tiny_llm()

    def run(pattern: str, **given: Any) -> fwk.Completion:
        sampling = SamplingParams(**{"max_tokens": 30, "seed": 1, **given}, grammar=GrammarRequest("regex", pattern))
        return llm.generate([PROMPTS[1]], sampling)[0]

    for given in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"max_tokens": 3}, {"temperature": 0.0}):
        done = run("[0-9]{3}", **given)
        assert (len(done.text), len(done.token_ids), done.finish_reason, done.stop_reason) == (3, 3, "stop", None)
        assert done.text.isdigit()
    assert (run("a{9}", max_tokens=8).text, run("a{9}", max_tokens=8).finish_reason) == ("a" * 8, "length")
    # The end is allowed where the grammar may end, unless end tokens end nothing or too few tokens have come.
    lengths = {len(run("a*", seed=i, logit_bias={END: 5.0}).text) for i in range(12)}
    assert min(lengths) < 29
    for i in range(6):
        assert len(run("a*", seed=i, ignore_eos=True, logit_bias={END: 5.0}).text) == 30
        assert len(run("a*", seed=i, min_tokens=10, logit_bias={END: 9.0}).text) >= 10
    assert run("abc", stop=["b"]).text == "a"
    assert run("[ab]+c", stop_token_ids=[ord("c")]).finish_reason in ("stop", "length")


def test_other_masks_and_the_grammar_hold_together(tiny_llm: Callable[..., fwk.LLM]) -> None:
    llm = tiny_llm()
    digits = GrammarRequest("regex", "[0-9]{6}")
    sampling = SamplingParams(max_tokens=9, seed=1, grammar=digits, allowed_token_ids=[ord("3"), ord("4"), ord("x")])
    assert set(llm.generate([PROMPTS[0]], sampling)[0].text) <= {"3", "4"}
    sampling = SamplingParams(max_tokens=9, seed=1, grammar=digits, allowed_token_ids=[ord("x")])
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        llm.generate([PROMPTS[0]], sampling)
    assert llm.generate([PROMPTS[0]], settings(1, ["regex"]))[0].finish_reason == "stop"


def test_a_wrong_grammar_is_refused_before_anything_runs(tiny_llm: Callable[..., fwk.LLM]) -> None:
    llm = tiny_llm()
    steps = llm.engine.stats().steps
    for grammar in (
        GrammarRequest("regex", "("),
        GrammarRequest("json_schema", "{"),
        GrammarRequest("regex", "a" * 300_000),
    ):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate([PROMPTS[0], PROMPTS[1]], [SamplingParams(), SamplingParams(grammar=grammar)])
        assert caught.value.param == "grammar"
    assert llm.engine.stats().steps == steps


def test_without_a_backend_there_is_no_constrained_output(make: Callable[..., fwk.LLM]) -> None:
    llm = make(grammar_backend="none")
    with pytest.raises(InvalidRequest, match="no grammar backend"):
        llm.generate([[1, 2]], settings(1, ["regex"]))
    with pytest.raises(PluginError, match=r"unknown grammar backend 'xgrammer' \(did you mean 'xgrammar'"):
        make(grammar_backend="xgrammer")
    with pytest.raises(ConfigError, match="llguidance, which is not selected"):
        make(grammar_backend="slow", constrained_json_disable_any_whitespace=True)
    with pytest.raises(InvalidRequest, match="'slow' does not do 'choice', only regex"):
        make(grammar_backend="slow").generate([[1, 2]], settings(1, ["choice"]))


def test_a_loaded_engine_gets_ready_to_compile(make: Callable[..., fwk.LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    built_by: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(SlowBackend, "built_by", built_by)
    llm = make(grammar_backend="slow")
    assert built_by.get(timeout=20).startswith("fwk-grammar")  # the worker's, though nobody has asked for a grammar
    SlowBackend.may_go_on.set()
    assert len(llm.generate([[1, 2]], settings(1, ["regex"]))) == 1
    while (name := built_by.get(timeout=20)) != threading.current_thread().name:  # the one that checks requests
        assert name.startswith("fwk-grammar")  # of an engine of another test, built late


def request(name: str, tokens: list[int], n: int = 1, grammar: str | None = None, max_tokens: int = 4) -> Request:
    bound = GrammarRequest("regex", grammar) if grammar is not None else None
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        n=n,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, grammar=bound),
    )


def run(llm: fwk.LLM, until: Callable[[dict[str, str]], bool], limit: int = 3000) -> dict[str, str]:
    """Step until the finish reasons by request are as wanted."""
    ended: dict[str, str] = {}
    for _ in range(limit):
        for event in llm.engine.step():
            if event.finish_reason is not None:
                ended[event.request_id] = event.error or event.finish_reason
        if until(ended):
            return ended
    raise AssertionError(f"only {ended} ended")


def test_nobody_waits_for_a_compiler_but_who_asked(make: Callable[..., fwk.LLM]) -> None:
    SlowBackend.may_go_on.clear()
    llm = make(grammar_backend="slow", max_running_requests=2)
    engine = llm.engine
    engine.add(request("bound", PROMPTS[0], n=2, grammar="slow"))
    engine.add(request("early", PROMPTS[1]))
    engine.add(request("wrong", PROMPTS[1], grammar="raise"))
    engine.add(request("unwanted", PROMPTS[2], grammar="slow too"))
    run(llm, lambda ended: "early" in ended)
    engine.add(request("late", PROMPTS[3], max_tokens=30))
    ended = run(llm, lambda ended: "late" in ended)
    assert ended == {"late": "length"}
    assert (engine.stats().num_waiting, engine.has_work) == (4, True)
    assert [event.finish_reason for event in engine.abort("unwanted")] == ["abort"]
    SlowBackend.may_go_on.set()
    ended = run(llm, lambda _: not engine.has_work)  # of the two of "bound" one may start a step before the other
    assert ended == {"bound": "stop", "wrong": f"the grammar cannot continue: {NAMED}"}
    assert engine.step() == []


def test_many_grammars_are_prepared_a_few_at_a_time_and_shared(make: Callable[..., fwk.LLM]) -> None:
    SlowBackend.may_go_on.clear()
    llm = make(grammar_backend="slow", max_running_requests=8)
    for i in range(100):
        llm.engine.add(request(f"r{i}", PROMPTS[i % 4], grammar=f"grammar {i % 50}"))
    for _ in range(3):
        llm.engine.step()
    SlowBackend.num_compiled = 0
    SlowBackend.may_go_on.set()
    ended = run(llm, lambda ended: len(ended) == 100)
    assert set(ended.values()) == {"stop"}
    assert 50 <= SlowBackend.num_compiled <= 100


@pytest.mark.sweep
@pytest.mark.model
def test_smollm2_answers_in_the_grammar() -> None:
    names = ["schema", "regex", "choice", "gbnf", "tagged", "object"]
    prompt = "<|im_start|>user\nTell me about Bob, 42 years old, as JSON.<|im_end|>\n<|im_start|>assistant\n"
    with fwk.LLM(max_total_tokens=4096, sampling_backend="torch") as llm:  # whose draws the seeds were tried with
        sampling = [
            SamplingParams(max_tokens=96, seed=i, temperature=0.8, grammar=JUDGED[names[i % 6]][0]) for i in range(18)
        ]
        outputs = llm.generate([prompt] * 18, sampling)
        ended = [(i, done) for i, done in enumerate(outputs) if done.finish_reason == "stop"]
        assert len(ended) >= 14
        for i, done in ended:
            assert JUDGED[names[i % 6]][1](done.text)
        greedy = SamplingParams(max_tokens=40, temperature=0.0, grammar=JUDGED["schema"][0])
        assert json.loads(llm.generate(prompt, greedy)[0].text)["name"]
