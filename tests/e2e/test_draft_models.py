"""Drafts by n-gram, by a second model, in trees, and drawn at random: the output is the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk import SamplingParams, SpeculativeDecoderSpec, hookimpl
from fwk.errors import FwkError
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeDecoder
from fwk.plugins import discover
from fwk_loaders.hub.source import HubSource
from tests.helpers.tiny import save_llama

PROMPTS = [[7, 8, 9] * 6, [5] * 20, list(range(10, 50)), [100, 101, 100, 101, 100], [3]]
ENGINE = {"max_total_tokens": 4096, "max_running_requests": 8, "check_blocks": True}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_algorithm": "NGRAM"},
    "tree": {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3},
    "suffix": {"speculative_algorithm": "suffix"},
    "same model": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "same"},
    "near model": {"speculative_algorithm": "standalone", "speculative_draft_model_path": "near"},
    "other model": {
        "speculative_algorithm": "standalone",
        "speculative_draft_model_path": "other",
        "speculative_adaptive": False,
        "speculative_num_draft_tokens": 3,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "same": save_llama(root / "same", seed=1),
        "near": save_llama(root / "near", seed=1, noise=0.004),
        "other": save_llama(root / "other", seed=2, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1),
        "vocab": save_llama(root / "vocab", vocab_size=400),
        "short": save_llama(root / "short", max_position_embeddings=64),
    }


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Iterator[fwk.LLM]:
    with fwk.LLM(str(folders["same"]), **ENGINE) as llm:
        yield llm


def drafter(folders: dict[str, Path], name: str, **options: Any) -> fwk.LLM:
    given = {**DRAFTERS[name], **options}
    if "speculative_draft_model_path" in given:
        given["speculative_draft_model_path"] = str(folders[given["speculative_draft_model_path"]])
    return fwk.LLM(str(folders["same"]), **{**ENGINE, **given})


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("options", [{}, {"max_total_tokens": 160, "page_size": 4, "chunked_prefill_size": 9}])
def test_output_is_the_plain_one(folders: dict[str, Path], plain: fwk.LLM, name: str, options: dict[str, Any]) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.8, "seed": 3, "top_k": 8},
        {"temperature": 0.5, "seed": 4, "repetition_penalty": 1.3, "prompt_logprobs": 0},
    ]
    with drafter(folders, name, **options) as llm:
        for setting in settings:
            sampling = SamplingParams(max_tokens=40, ignore_eos=True, **setting)
            wanted = plain.generate(PROMPTS, sampling, n=2)
            found = llm.generate(PROMPTS, sampling, n=2)
            assert [done.token_ids for done in found] == [done.token_ids for done in wanted]
            for one, other in zip(wanted, found, strict=True):
                for a, b in zip(one.logprobs or [], other.logprobs or [], strict=True):
                    assert (a.token_id, a.rank) == (b.token_id, b.rank)
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
        stats = llm.engine.stats()
        assert (stats.num_running, stats.num_held_blocks) == (0, 0)
        assert 0 < stats.accepted_draft_tokens <= stats.draft_tokens or name == "other model"
        if name == "same model":
            assert stats.accepted_draft_tokens > 0.9 * stats.draft_tokens
        if name == "near model":
            assert stats.accepted_draft_tokens > 0.4 * stats.draft_tokens
        if options:
            assert stats.preemptions > 0


def test_thresholds_keep_all_that_the_target_picks(folders: dict[str, Path]) -> None:
    """A model that drafts for itself drafts its own picks: none is lost to a threshold."""
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        with drafter(folders, "same model", speculative_adaptive=False, **{name: 0.4}) as llm:
            llm.generate(PROMPTS, sampling)
            stats = llm.engine.stats()
        assert stats.accepted_draft_tokens > 0.95 * stats.draft_tokens > 0, name


def test_accepted_drafts_save_steps(folders: dict[str, Path], plain: fwk.LLM) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with drafter(folders, "same model") as llm:
        llm.generate([PROMPTS[2]], sampling)
        assert llm.engine.stats().steps <= 1 + -(-59 // 6)


def test_a_prefix_in_the_cache_is_one_for_the_draft_model_too(folders: dict[str, Path]) -> None:
    prompt = list(range(10, 90))
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with drafter(folders, "same model") as llm:
        llm.generate([prompt], sampling)
        before = llm.engine.stats()
        [done] = llm.generate([prompt], sampling)
        after = llm.engine.stats()
    assert done.cached_tokens == 64
    drafted = after.draft_tokens - before.draft_tokens
    assert after.accepted_draft_tokens - before.accepted_draft_tokens == drafted > 0


def test_a_draft_model_of_the_hub_has_a_revision(
    folders: dict[str, Path], plain: fwk.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def fetch(_self: HubSource, name: str, revision: str | None, *_: Any) -> Path:
        asked.append((name, revision))
        return folders["same"]

    monkeypatch.setattr(HubSource, "fetch", fetch)
    options = {"speculative_draft_model_path": "org/draft", "speculative_algorithm": "standalone"}
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    wanted = [done.token_ids for done in plain.generate(PROMPTS, sampling)]
    for revision in ("v1", None):
        with fwk.LLM(str(folders["same"]), **ENGINE, **options, speculative_draft_model_revision=revision) as llm:
            assert [done.token_ids for done in llm.generate(PROMPTS, sampling)] == wanted
    assert dict.fromkeys(asked) == dict.fromkeys([("org/draft", "v1"), ("org/draft", None)])
    options["speculative_draft_model_path"] = str(folders["other"])
    with pytest.raises(FwkError, match=r"--revision v1: .* is on this machine and has none"):
        fwk.LLM(str(folders["same"]), **ENGINE, **options, speculative_draft_model_revision="v1")


class OracleDecoder(SpeculativeDecoder):
    """Knows the output, and hides it in trees: on every level a wrong draft comes before the right one."""

    max_drafts = 7
    known: list[list[int]] = []

    def propose(self, view: DraftView) -> Drafts:
        token_ids: list[list[int]] = []
        parents: list[list[int]] = []
        for slot, length, most in zip(
            view.slots.tolist(), view.num_tokens.tolist(), view.max_drafts.tolist(), strict=True
        ):
            tokens = view.token_ids[slot, :length].tolist()
            right = next(full[length : length + 3] for full in self.known if full[:length] == tokens)
            drafts: list[int] = []
            above: list[int] = []
            at = -1
            for token in right:
                above += [at, at, at]
                at = len(drafts) + 2
                drafts += [(token + 1) % 320, (token + 2) % 320, token]
            token_ids.append(drafts[:most])
            parents.append(above[:most])
        return Drafts(token_ids, parents)


class OraclePlugin:
    """Declares it."""

    @hookimpl
    def speculative_decoders(self) -> list[SpeculativeDecoderSpec]:
        return [SpeculativeDecoderSpec(name="oracle", load="tests.e2e.test_draft_models:OracleDecoder")]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2}])
def test_the_right_branch_of_a_tree_is_found_and_kept(
    folders: dict[str, Path], plain: fwk.LLM, settings: dict[str, Any]
) -> None:
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1, **settings)
    wanted = plain.generate(PROMPTS, sampling)
    OracleDecoder.known = [[*prompt, *done.token_ids] for prompt, done in zip(PROMPTS, wanted, strict=True)]
    plugins = discover()
    plugins.register(OraclePlugin(), "speculative.oracle", "tests", "1")
    with fwk.LLM(str(folders["same"]), plugins=plugins, speculative_algorithm="oracle", **ENGINE) as llm:
        found = llm.generate(PROMPTS, sampling)
        stats = llm.engine.stats()
    assert [done.token_ids for done in found] == [done.token_ids for done in wanted]
    for one, other in zip(wanted, found, strict=True):
        assert [x.logprob for x in other.logprobs or []] == pytest.approx(
            [x.logprob for x in one.logprobs or []], abs=1e-3
        )
    assert stats.accepted_draft_tokens > 1.5 * 0.6 * len(PROMPTS) * 40 / 3  # two levels of three fit into seven drafts


@pytest.mark.gate(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_algorithm": "standalone"}, "give --speculative-draft-model-path"),
        ({"speculative_algorithm": "standalone", "speculative_draft_model_path": "vocab"}, "vocabulary of 400 tokens"),
        ({"speculative_algorithm": "standalone", "speculative_draft_model_path": "short"}, "set --context-length 64"),
        ({"speculative_algorithm": "standalone", "speculative_draft_model_path": "nowhere"}, "no model"),
        ({"speculative_algorithm": "ngrams"}, "did you mean 'ngram'"),
        ({"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 0}, "greater than or equal to 1"),
        (
            {"speculative_algorithm": "ngram", "speculative_draft_model_path": "same"},
            "belongs to speculative.eagle, which is not selected",
        ),
        ({"speculative_num_draft_tokens": 3}, "not selected"),
    ],
)
def test_wrong_options_are_one_line(folders: dict[str, Path], options: dict[str, Any], message: str) -> None:
    path = options.get("speculative_draft_model_path")
    given = {**options, "speculative_draft_model_path": str(folders.get(path, path))} if path else options
    with pytest.raises(FwkError, match=message) as caught:
        fwk.LLM(str(folders["same"]), **given)
    assert "\n" not in str(caught.value)
