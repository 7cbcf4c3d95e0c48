"""The n-gram decoder's proposals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fwk.errors import ConfigError
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeContext, Verified
from fwk_speculative._common import DraftDepth
from fwk_speculative._common.corpus import Corpus
from fwk_speculative._common.matches import longest_match, newest_matches
from fwk_speculative.ngram import NgramOptions, speculative_decoders
from fwk_speculative.ngram.decoder import NgramDecoder


def decoder(**options: Any) -> NgramDecoder:
    given = NgramOptions(**options)
    return NgramDecoder(SpeculativeContext(4, 64, 100, cast(Any, None), given, encode=lambda text: []))


def with_corpus(path: Path, *texts: str, lines: str = "", **options: Any) -> NgramDecoder:
    """Its tokens are numbers, as in ``1 2 3``."""
    path.write_text(lines or "".join(json.dumps(text) + "\n" for text in texts))
    given = NgramOptions(speculative_ngram_external_corpus_path=str(path), **options)
    encode = lambda text: [int(word) for word in text.split()]  # noqa: E731
    return NgramDecoder(SpeculativeContext(4, 64, 100, cast(Any, None), given, encode=encode))


def propose(maker: NgramDecoder, *sequences: list[int], most: int = 64, ahead: int = 0) -> Drafts:
    table = np.zeros((4, 65), np.int32)
    for slot, tokens in enumerate(sequences):
        table[slot, : len(tokens)] = tokens
    lengths = np.array([len(tokens) for tokens in sequences])
    count = len(sequences)
    return maker.propose(DraftView(np.arange(count), lengths, np.full(count, most), table, cast(Any, None), ahead))


def copied_token_by_token(text: list[int], longest: int, count: int) -> list[int]:
    """The newest of the longest matches of the text's end, copied by LZ77's rule: one token after another."""
    for matched in range(min(longest, len(text) - 1), 0, -1):
        ends = [end for end in range(matched, len(text)) if text[end - matched : end] == text[-matched:]]
        if ends:
            whole = [*text]
            for source in range(ends[-1], ends[-1] + count):
                whole.append(whole[source])
            return whole[len(text) :]
    return []


def test_drafts_follow_the_longest_match_and_of_equals_the_newest() -> None:
    maker = decoder(speculative_num_draft_tokens=3)
    drafts = propose(maker, [1, 2, 3, 50, 51, 52, 9, 2, 3, 60, 61, 1, 2, 3], [7, 3, 40, 3, 41, 42, 3], [1, 2, 3])
    assert drafts.token_ids == [[50, 51, 52], [41, 42, 3], []]
    assert drafts.parents is None


@pytest.mark.parametrize("kind", ["BFS", "PROB"])
@pytest.mark.parametrize("ahead", [0, 1, 6])
def test_what_repeats_is_drafted_beyond_its_end(kind: str, ahead: int) -> None:
    rng = np.random.default_rng(ahead)
    most, num_repeating = 5, 0
    for _ in range(200):
        longest, period = int(rng.integers(1, 9)), int(rng.integers(1, 8))
        pattern, repeats = rng.integers(0, 4, period).tolist(), int(rng.integers(period, 20))
        first = 0 if kind == "BFS" else 50  # the most frequent of equals must be the pattern's
        begin = rng.integers(first, first + 5, rng.integers(0, 12)).tolist()
        text = [*begin, *(pattern[i % period] for i in range(repeats))]
        maker = decoder(
            speculative_num_draft_tokens=most,
            speculative_ngram_max_match_window_size=longest,
            speculative_ngram_match_type=kind,
        )
        [found] = propose(maker, text, ahead=ahead).token_ids
        if kind == "BFS":
            assert found == copied_token_by_token(text, longest, most + ahead)
        if repeats >= longest + period and longest >= period:  # nothing but the pattern matches so far back
            num_repeating += 1
            assert found == [pattern[(repeats + i) % period] for i in range(most + ahead)]
    assert num_repeating > 20


def test_what_a_launched_step_adds_is_none_of_the_tokens_along_a_continuation(tmp_path: Path) -> None:
    text = [*range(20), 0]
    short = {"speculative_num_draft_tokens": 6, "speculative_ngram_branch_length": 3}
    assert propose(decoder(**short), text, ahead=4).token_ids == [[1, 2, 3, 4, 5, 6, 7]]
    other = {**short, "speculative_ngram_external_sam_budget": 2}
    maker = with_corpus(tmp_path / "texts", "1 2 3 4 5 6 7 8 9", **other)
    assert propose(maker, [1, 2], ahead=4).token_ids == [[3, 4, 5, 6, 7, 8]]


def test_what_may_be_drafted_is_bounded() -> None:
    maker = decoder(speculative_num_draft_tokens=3)
    assert propose(maker, [5, 6, 7, 8, 5], most=2).token_ids == [[6, 7]]
    assert propose(maker, [5, 6, 7, 8, 5], most=0).token_ids == [[]]
    assert propose(maker, [5, 5]).token_ids == [[5, 5, 5]]
    assert propose(maker, [5]).token_ids == [[]]


def test_a_short_match_is_not_followed() -> None:
    maker = decoder(speculative_ngram_min_match_window_size=2)
    assert propose(maker, [5, 6, 7, 5]).token_ids == [[]]
    assert propose(maker, [4, 5, 6, 7, 4, 5]).token_ids == [[6, 7, 4, 5, 6]]


def test_breadth_makes_a_tree_of_different_continuations() -> None:
    maker = decoder(speculative_num_draft_tokens=5, speculative_ngram_max_bfs_breadth=2)
    drafts = propose(maker, [1, 30, 31, 32, 1, 40, 41, 42, 1, 50, 51, 1], [1, 2, 1, 2, 1])
    assert drafts.token_ids == [[50, 40, 51, 41, 1], [2, 1, 2, 1, 2]]
    assert drafts.parents == [[-1, -1, 0, 1, 2], [-1, 0, 1, 2, 3]]
    [spec] = speculative_decoders()
    assert spec.required_features(NgramOptions(speculative_ngram_max_bfs_breadth=2)) == {"tree_mask"}
    assert not spec.required_features(NgramOptions())
    assert not spec.required_features(None)


@pytest.mark.parametrize("ahead", [1, 4])
def test_a_tree_ahead_grows_from_the_end_of_its_first_path(ahead: int) -> None:
    rng = np.random.default_rng(ahead)
    num_wide, longest = 0, 2
    for _ in range(200):
        text = rng.integers(0, 5, rng.integers(2, 40)).tolist()
        maker = decoder(
            speculative_num_draft_tokens=6,
            speculative_ngram_max_bfs_breadth=2,
            speculative_ngram_min_bfs_breadth=2,
            speculative_ngram_max_match_window_size=longest,
        )
        drafts = propose(maker, text, ahead=ahead)
        assert drafts.parents is not None
        first = copied_token_by_token(text, longest, ahead)
        assert drafts.token_ids[0][:ahead] == first
        assert drafts.parents[0][:ahead] == list(range(-1, len(first) - 1))
        if first:
            after = propose(maker, text + first)
            assert after.parents is not None
            assert drafts.token_ids[0][ahead:] == after.token_ids[0]
            assert drafts.parents[0][ahead:] == [parent + ahead for parent in after.parents[0]]
            num_wide += after.parents[0].count(-1) == 2
    assert num_wide > 50


def test_windows_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="min-match-window-size 9 is larger than"):
        decoder(speculative_ngram_min_match_window_size=9, speculative_ngram_max_match_window_size=3)


def test_depth_follows_acceptance() -> None:
    depth = DraftDepth(3, 8, True)
    slots = np.array([0, 1, 2])

    def observe(drafted: list[int], kept: list[int]) -> list[int]:
        depth.observe(Verified(slots, np.array(drafted), np.array(kept)))
        return depth.of(slots).tolist()

    assert observe([8, 8, 0], [2, 0, 0]) == [3, 1, 8]
    assert observe([3, 1, 8], [3, 1, 7]) == [6, 2, 8]
    depth.reset([0])
    assert depth.of(slots).tolist() == [8, 2, 8]
    fixed = DraftDepth(1, 8, False)
    fixed.observe(Verified(np.array([0]), np.array([8]), np.array([0])))
    assert fixed.of(np.array([0])).tolist() == [8]


def test_who_accepts_nothing_rests() -> None:
    depth, slots = DraftDepth(2, 4, True), np.array([0, 1])

    def rest() -> int:
        """Steps without drafts for slot 0, while slot 1 accepts everything."""
        count = 0
        while (found := depth.of(slots).tolist())[0] == 0:
            assert found[1] == 4
            count += 1
        return count

    rests: list[int] = []
    for _ in range(8):
        depth.observe(Verified(slots, np.array([1, 4]), np.array([0, 4])))
        rests.append(rest())
    assert rests == [0, 0, 2, 4, 8, 16, 16, 16]
    depth.observe(Verified(slots, np.array([1, 4]), np.array([1, 4])))
    assert rest() == 0
    for _ in range(4):
        depth.observe(Verified(slots, np.array([1, 4]), np.array([0, 4])))
    depth.reset([0])
    assert depth.of(slots).tolist() == [4, 4]


def test_outputs_of_earlier_requests_are_searched_where_there_is_no_match() -> None:
    maker = decoder(speculative_num_draft_tokens=3, speculative_ngram_capacity=20)
    propose(maker, [1, 2, 3])
    view_of = propose(maker, [1, 2, 3, 60, 61, 62])
    assert view_of.token_ids == [[]]
    maker.forget([0])
    assert propose(maker, [9, 60]).token_ids == [[61, 62]]  # from its first output token to its last
    assert propose(maker, [9, 2]).token_ids == [[]]  # a prompt is not kept
    assert propose(maker, [60, 7, 60]).token_ids == [[7, 60, 7]]  # its own text comes first
    without = decoder(speculative_num_draft_tokens=3)
    propose(without, [1, 2, 3])
    propose(without, [1, 2, 3, 60, 61, 62])
    without.forget([0])
    assert propose(without, [9, 60]).token_ids == [[]]


def test_branches_are_bounded_and_ranked() -> None:
    text = [1, 30, 31, 32, 1, 30, 33, 34, 1, 50, 51, 1]
    newest = decoder(speculative_num_draft_tokens=6, speculative_ngram_branch_length=2)
    assert propose(newest, text).token_ids == [[50, 51]]
    frequent = decoder(speculative_num_draft_tokens=6, speculative_ngram_match_type="PROB")
    assert propose(frequent, text).token_ids == [[30, 33, 34, 1, 50, 51]]
    wide = {"speculative_ngram_max_bfs_breadth": 3, "speculative_ngram_max_match_window_size": 2}
    long = [8, 1, 40, 8, 1, 50, 8, 1]  # a match of the longest length
    assert propose(decoder(**wide, speculative_num_draft_tokens=2), long).token_ids == [[50, 8]]
    both = decoder(**wide, speculative_num_draft_tokens=2, speculative_ngram_min_bfs_breadth=2)
    assert propose(both, long).token_ids == [[50, 40]]
    with pytest.raises(ConfigError, match="min-bfs-breadth 4 is larger than"):
        decoder(**wide, speculative_ngram_min_bfs_breadth=4)


def test_a_corpus_is_followed_where_nothing_else_matches(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    maker = with_corpus(file, "1 2 3 4 5 6", "9 2 3 7 8", speculative_num_draft_tokens=4)
    assert propose(maker, [50, 2, 3]).token_ids == [[7, 8]], "the newest of equals, to its end"
    assert propose(maker, [1, 2, 3]).token_ids == [[4, 5, 6]], "the longest"
    assert propose(maker, [50, 3, 7, 60, 3]).token_ids == [[7, 60, 3, 7]], "its own text comes first"
    assert propose(maker, [50, 60]).token_ids == [[]]
    assert propose(maker, [8, 1]).token_ids == [[]], "texts do not run into one another"
    assert propose(maker, [6, 9]).token_ids == [[]]
    wide = with_corpus(
        file, "1 2 3 4", "1 2 5 6", speculative_ngram_max_bfs_breadth=2, speculative_ngram_external_sam_budget=3
    )
    assert propose(wide, [70, 1, 2]).token_ids == [[5, 3, 6, 4]]
    narrow = with_corpus(file, "1 2 3 4 5 6", speculative_ngram_external_sam_budget=2)
    assert propose(narrow, [70, 1, 2]).token_ids == [[3, 4]]
    assert propose(with_corpus(file, lines='{"text": "1 2 3"}\n\n'), [1, 2]).token_ids == [[3]]


def test_the_index_finds_what_a_search_of_all_texts_finds(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 6, rng.integers(1, 40)).tolist() for _ in range(60)]
    corpus = Corpus(iter(texts), 10_000, "it")
    for _ in range(300):
        end = rng.integers(0, 6, rng.integers(1, 9))
        places, matched = corpus.longest_match(end)
        wanted, length = longest_match(corpus.text, end)
        if length < 2:
            assert (len(places), matched) == (0, 0)
        else:
            assert (places.tolist(), matched) == (wanted.tolist(), length)


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ('"1 2"\n[3]\n', {}, r"texts\.jsonl: line 2 is neither a JSON string nor an object with a string under 'text'"),
        ("not json\n", {}, "line 1 is neither"),
        ('"1 2 3"\n', {"speculative_ngram_external_corpus_max_tokens": 2}, "holds more than 2 tokens: shorten it or"),
    ],
)
def test_a_wrong_corpus_is_told(lines: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        with_corpus(tmp_path / "texts.jsonl", lines=lines, **options)


def test_a_missing_corpus_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere cannot be read: .*No such file"):
        decoder(speculative_ngram_external_corpus_path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="external-sam-budget is of a corpus: give"):
        decoder(speculative_ngram_external_sam_budget=3)


def test_many_texts_are_looked_up_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(0, 3, (40, 300)).astype(np.int32)
    lengths = rng.integers(1, 300, 40)
    slots = rng.permutation(40)
    places, matched = newest_matches(table, slots, lengths, 6)
    for slot, length, place, count in zip(slots, lengths, places, matched, strict=True):
        text = table[slot, :length]
        found, most = longest_match(text, text[-6:])
        assert (place, count) == ((max(found), most) if most else (0, 0))
