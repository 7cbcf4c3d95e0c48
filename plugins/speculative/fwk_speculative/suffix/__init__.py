"""Speculation without a model: drafts what followed the same tokens in this request, or in outputs of earlier ones."""

from __future__ import annotations

from fwk import SpeculativeDecoderSpec, hookimpl, option
from fwk_speculative._common import DraftOptions


class SuffixOptions(DraftOptions):
    """Options of the ``suffix`` decoder."""

    speculative_suffix_max_match: int = option(
        24,
        "Most tokens at the sequence's end that are compared with earlier text.",
        aliases=["suffix-decoding-max-tree-depth"],
        ge=1,
        le=256,
        stability="beta",
    )
    speculative_suffix_capacity: int = option(
        65536,
        "Tokens of earlier requests' outputs that are kept and searched; 0 searches the request's own text alone.",
        ge=0,
        le=1 << 22,
        stability="beta",
    )
    speculative_suffix_max_factor: float = option(
        1.0,
        "Most tokens drafted for each token that matched.",
        aliases=["suffix-decoding-max-spec-factor"],
        gt=0,
        le=64,
        stability="beta",
    )
    speculative_suffix_min_probability: float = option(
        0.1,
        "A draft ends where its estimated probability, from how often each continuation was seen, falls below this.",
        aliases=["suffix-decoding-min-token-prob"],
        ge=0,
        le=1,
        stability="beta",
    )


@hookimpl
def speculative_decoders() -> list[SpeculativeDecoderSpec]:
    return [
        SpeculativeDecoderSpec(
            name="suffix",
            load="fwk_speculative.suffix.decoder:SuffixDecoder",
            options=SuffixOptions,
            api=2,
            summary="Drafts the most frequent continuation of the last tokens in this request and in earlier outputs.",
        )
    ]
