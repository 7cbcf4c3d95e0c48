"""The suffix decoder's proposals, against a suffix tree written out."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fwk import LLM, SamplingParams
from fwk.interfaces.sampling import SamplingContext
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeContext, SpeculativeDecoder
from fwk.types import cache_namespace
from fwk_process.progress import offline_bar
from fwk_sampling.processors.truncation import Truncation
from fwk_speculative._common.matches import longest_match
from fwk_speculative._common.outputs import OutputStore
from fwk_speculative.ngram import NgramOptions
from fwk_speculative.ngram.decoder import NgramDecoder
from fwk_speculative.suffix import SuffixOptions
from fwk_speculative.suffix.decoder import SuffixDecoder

SLOTS, LENGTH = 4, 200


class Host:
    """A decoder with the table of a worker's sequences."""

    def __init__(self, **options: Any) -> None:
        given = SuffixOptions(speculative_adaptive=False, **options)
        self.decoder = SuffixDecoder(SpeculativeContext(SLOTS, LENGTH, 100, cast(Any, None), given))
        self.table = np.zeros((SLOTS, LENGTH + 1), np.int32)

    def propose(self, sequences: dict[int, list[int]], most: int = 64, ahead: int = 0) -> Drafts:
        for slot, tokens in sequences.items():
            self.table[slot, : len(tokens)] = tokens
        lengths = np.array([len(tokens) for tokens in sequences.values()])
        most_each = np.full(len(sequences), most)
        view = DraftView(np.array(list(sequences)), lengths, most_each, self.table, cast(Any, None), ahead)
        return self.decoder.propose(view)

    def one(self, tokens: list[int], most: int = 64, ahead: int = 0) -> list[int]:
        return self.propose({0: tokens}, most, ahead).token_ids[0]


def by_tree(texts: list[list[int]], end: list[int], deepest: int) -> Counter[int] | None:
    """What followed the longest suffix of ``end`` in the texts: the counts at its node of their suffix tree."""
    tree: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for start in range(len(text)):
            for stop in range(start + 1, min(start + deepest, len(text) - 1) + 1):
                tree[tuple(text[start:stop])][text[stop]] += 1
    for length in range(min(deepest, len(end)), 0, -1):
        if tuple(end[-length:]) in tree:
            return tree[tuple(end[-length:])]
    return None


def test_the_first_token_is_the_trees_most_frequent() -> None:
    rng = np.random.default_rng(0)
    drafted = 0
    for _ in range(300):
        text = rng.integers(1, 6, rng.integers(2, 60)).tolist()
        deepest = int(rng.integers(1, 8))
        host = Host(speculative_suffix_max_match=deepest, speculative_suffix_min_probability=0.0)
        found, counts = host.one(text), by_tree([text], text, deepest)
        assert bool(found) == (counts is not None)
        if counts is not None:
            drafted += 1
            assert counts[found[0]] == max(counts.values())
    assert drafted > 200


@pytest.mark.parametrize("kind", [SuffixDecoder, NgramDecoder])
def test_outputs_are_followed_within_their_namespace_alone(kind: type[SpeculativeDecoder]) -> None:
    """By the time of a reply clients could else tell what others, with another ``cache_salt``, have been told."""
    options: Any = SuffixOptions(speculative_adaptive=False)
    if kind is NgramDecoder:
        options = NgramOptions(speculative_adaptive=False, speculative_ngram_capacity=100)
    decoder = kind(SpeculativeContext(SLOTS, LENGTH, 100, cast(Any, None), options))
    table, namespaces = np.zeros((SLOTS, LENGTH + 1), np.int32), [""] * SLOTS

    def drafts(namespace: str, tokens: list[int], slot: int = 0) -> Any:
        namespaces[slot] = namespace
        table[slot, : len(tokens)] = tokens
        lengths, most, nowhere = np.array([len(tokens)]), np.array([3]), cast(Any, None)
        view = DraftView(np.array([slot]), lengths, most, table, nowhere, namespaces=namespaces)
        return decoder.propose(view).token_ids[0]

    for text in ([50, 51, 10], [50, 51, 10, 11, 12, 13, 14]):
        drafts("mine", text)
    namespaces[0] = "theirs"  # the slot's next sequence comes before the decoder hears of the end
    decoder.forget([0])
    assert list(drafts("mine", [60, 11, 12], 1))[:2] == [13, 14]
    for namespace in ("theirs", ""):
        assert list(drafts(namespace, [60, 11, 12], 2)) == []
        decoder.forget([2])


def test_outputs_of_ended_requests_are_followed() -> None:
    host = Host()
    host.one([50, 51, 10])  # the first output token is known: the prompt is [50, 51]
    host.one([50, 51, 10, 11, 12, 13, 14])
    host.decoder.forget([0])
    assert host.one([60, 11, 12], most=2) == [13, 14]
    assert host.one([7, 50, 51]) == [], "prompts are not kept"
    none = Host(speculative_suffix_capacity=0)
    none.one([50, 10])
    none.one([50, 10, 11, 12])
    none.decoder.forget([0])
    assert none.one([60, 10, 11]) == []


def test_a_draft_is_as_long_as_its_match_allows_and_as_likely_as_asked() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 1, 2]
    assert Host().one(text) == [3, 4], "a match of two tokens is followed by two"
    assert Host(speculative_suffix_max_factor=2.0).one(text) == [3, 4, 5, 6]
    assert Host(speculative_num_draft_tokens=1).one(text) == [3]
    assert Host().one(text, most=0) == []
    forked = [1, 2, 3, 8, 5, 1, 2, 4, 9, 1, 2]  # after 1, 2 each of two tokens came once
    assert Host(speculative_suffix_min_probability=0.6).one(forked) == []
    assert len(Host(speculative_suffix_min_probability=0.5).one(forked)) == 2


@pytest.mark.parametrize("ahead", [0, 1, 6])
def test_what_repeats_is_drafted_beyond_its_end(ahead: int) -> None:
    rng = np.random.default_rng(ahead)
    longer = 0
    for _ in range(200):
        period, deepest = int(rng.integers(1, 6)), int(rng.integers(5, 16))
        pattern, repeats = rng.integers(1, 4, period).tolist(), int(rng.integers(2 * period, 40))
        begin = rng.integers(50, 90, rng.integers(0, 12)).tolist()
        text = [*begin, *(pattern[i % period] for i in range(repeats))]
        matched = min(deepest, repeats - period)
        found = Host(speculative_suffix_max_match=deepest).one(text, ahead=ahead)
        assert found[:matched] == [pattern[(repeats + i) % period] for i in range(min(5 + ahead, matched))]
        longer += matched < deepest and len(found) > period  # one place matched, a period before the end
    assert longer > 20


def test_what_other_requests_wrote_is_not_drafted_beyond_its_end() -> None:
    host = Host()
    host.one([7, 10])
    host.one([7, 10, 11, 12, 13, 14])
    host.decoder.forget([0])
    assert host.one([60, 10, 11, 12]) == [13, 14]


def test_slots_are_used_again_and_told_apart() -> None:
    host = Host()
    host.propose({0: [1, 20, 21, 22], 1: [2, 30]})
    host.decoder.forget([0])
    host.propose({0: [3, 40, 41, 42, 43], 1: [2, 30, 31, 32]})
    host.decoder.forget([1, 0])
    assert host.propose({2: [9, 30, 31]}).token_ids == [[32]]


def test_the_store_keeps_the_newest() -> None:
    store = OutputStore(10)
    for i in range(50):
        tokens = 10 * i + np.arange(3 + i % 3, dtype=np.int32)
        store.add(tokens)
        text = store.text
        places, matched = longest_match(text, tokens[:2])
        assert matched == 2
        assert tokens[2] in text[places]
        assert text[np.flatnonzero(text == tokens[-1])[-1] + 1] == -1, "another output's tokens follow"
        assert len(text) <= 10
    store.add(np.arange(100, 140, dtype=np.int32))
    assert store.text.max() == 139
    store.add(np.array([], np.int32))
    for capacity in (0, 1):
        OutputStore(capacity).add(np.array([1, 2], np.int32))


@pytest.mark.parametrize(("text", "end"), [([], [1]), ([1], [1]), ([1, 2], []), ([1, 2, 3], [9])])
def test_no_match(text: list[int], end: list[int]) -> None:
    assert longest_match(np.array(text, np.int32), np.array(end, np.int32))[1] == 0


def test_a_server_tells_the_namespaces_and_the_tokenizer(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``DraftView.namespaces`` is what ``cache_salt`` makes of a request, ``SamplingContext.text`` reads text."""
    seen: list[str] = []
    ids: list[list[int]] = []
    propose, begin = SuffixDecoder.propose, Truncation.__init__

    def listen(self: SuffixDecoder, view: DraftView) -> Drafts:
        seen.extend(view.namespaces[slot] for slot in view.slots.tolist())
        return propose(self, view)

    def ask(self: Truncation, context: SamplingContext) -> None:
        assert context.text is not None
        ids.append(context.text().encode("Hi", add_special_tokens=False))
        begin(self, context)

    monkeypatch.setattr(SuffixDecoder, "propose", listen)
    monkeypatch.setattr(Truncation, "__init__", ask)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": 256, "speculative_algorithm": "suffix"}
    with LLM(str(tiny_folder), **options) as llm:
        item: Any = llm.inputs([[5, 6, 7]], sampling, 1)[0]
        for salt in ("", "salt"):
            seen.clear()
            with offline_bar("prompts", 1, False) as bar:
                list(llm._run([replace(item, cache_salt=salt)], bar, True))
            assert set(seen) == {cache_namespace(salt, "")}
        assert ids == [llm.text.encode("Hi", add_special_tokens=False)]
