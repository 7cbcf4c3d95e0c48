"""Speculation without a model: what followed the same words before will follow again."""

from __future__ import annotations

from typing import Any, Literal

from fwk import SpeculativeDecoderSpec, hookimpl, option
from fwk_speculative._common import DraftOptions


class NgramOptions(DraftOptions):
    """Options of the ``ngram`` decoder."""

    speculative_ngram_min_match_window_size: int = option(
        1,
        "Fewest tokens at the sequence's end that must have stood earlier.",
        aliases=["sp-min-token-match"],
        ge=1,
        le=64,
        stability="beta",
    )
    speculative_ngram_max_match_window_size: int = option(
        12,
        "Most tokens compared; the longest match is followed.",
        aliases=["sp-max-token-match"],
        ge=1,
        le=64,
        stability="beta",
    )
    speculative_ngram_max_bfs_breadth: int = option(
        1, "Different continuations followed at once; more than 1 drafts trees.", ge=1, le=16, stability="experimental"
    )
    speculative_ngram_min_bfs_breadth: int = option(
        1,
        "Continuations followed after a match of the longest length; after shorter ones up to the most.",
        ge=1,
        le=16,
        stability="experimental",
    )
    speculative_ngram_match_type: Literal["BFS", "PROB"] = option(
        "BFS",
        "Which continuations come first: BFS, the newest; PROB, the most frequent.",
        stability="experimental",
    )
    speculative_ngram_branch_length: int = option(
        18, "Most tokens drafted along one continuation.", ge=1, le=64, stability="experimental"
    )
    speculative_ngram_capacity: int = option(
        0,
        "Tokens of earlier requests' outputs that are searched where a request's own text has no match; 0: none.",
        ge=0,
        le=1 << 24,
        stability="experimental",
    )
    speculative_ngram_external_corpus_path: str | None = option(
        None,
        "A file of texts to draft from where nothing else has a match: JSON lines, each a string or an object with one "
        "under text.",
        stability="experimental",
    )
    speculative_ngram_external_corpus_max_tokens: int = option(
        10_000_000,
        "Most tokens of such a file; a longer one is refused. A token takes 16 bytes.",
        ge=1,
        le=1 << 30,
        stability="experimental",
    )
    speculative_ngram_external_sam_budget: int | None = option(
        None,
        "Most tokens drafted from such a file for one sequence in a step; by default as many as from other text.",
        ge=1,
        le=64,
        stability="experimental",
    )


class NgramSpec(SpeculativeDecoderSpec):
    """Needs tree masks only when it may draft trees."""

    def required_features(self, options: Any) -> frozenset[str]:
        is_tree = options is not None and options.speculative_ngram_max_bfs_breadth > 1
        return frozenset({"tree_mask"}) if is_tree else frozenset()


@hookimpl
def speculative_decoders() -> list[SpeculativeDecoderSpec]:
    return [
        NgramSpec(
            name="ngram",
            load="fwk_speculative.ngram.decoder:NgramDecoder",
            options=NgramOptions,
            api=2,
            summary="Drafts what followed the sequence's last tokens when they stood in it before.",
        )
    ]
