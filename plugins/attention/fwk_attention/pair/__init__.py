"""Two attention backends in one engine, over one KV cache: one computes prompts, the other next tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fwk import AttentionBackendSpec, FeatureSpec, Options, hookimpl, option
from fwk.errors import ConfigError
from fwk.interfaces.declaration import Ask, Facts
from fwk.interfaces.feature import FeatureRun

AUTO = "auto"
ONLY_PREFILL = frozenset({"tree_mask"})
"""Abilities that decoding needs nothing of: steps with trees of drafts are the prefill backend's."""
ONLY_DECODE = frozenset({"graph_capture"})
"""The other way round: what is captured are decode steps."""
ONLY_ALONE = frozenset({"cross_attention", "late_lengths"})
"""What a backend does that computes a whole step: queries without keys of their own, late lengths."""


class PairOptions(Options):
    """Options of ``features.attention_pair``."""

    prefill_attention_backend: str = option(
        AUTO,
        "Attention kernels of prompts and of drafts that are verified; auto: those of all steps.",
        stability="beta",
    )
    decode_attention_backend: str = option(
        AUTO, "Attention kernels of next tokens; auto: those of all steps.", stability="beta"
    )


@dataclass(frozen=True, kw_only=True)
class AttentionPairSpec(AttentionBackendSpec):
    """Declares two backends as one, which can do what both can."""

    @property
    def specs(self) -> tuple[AttentionBackendSpec, AttentionBackendSpec]:
        """Of prefill and decode."""
        prefill, decode = (item.declaration for item in self.made_of)
        assert isinstance(prefill, AttentionBackendSpec)
        assert isinstance(decode, AttentionBackendSpec)
        return prefill, decode

    def refusal(self, facts: Facts) -> str | None:
        if facts.features & ONLY_ALONE:
            return f"is asked for {', '.join(sorted(facts.features & ONLY_ALONE))}, which takes one backend: name one"
        prefill, decode = self.specs
        for spec, what, needless in ((prefill, "prompts", ONLY_DECODE), (decode, "next tokens", ONLY_PREFILL)):
            why = spec.refusal(replace(facts, features=facts.features - needless))
            if why is not None:
                return f"computes {what} with {spec.name!r}, which {why}"
        ours, theirs = (spec.kv_layouts.get(facts.kv_dtype) for spec in (prefill, decode))
        if ours is None or ours != theirs:
            kept = "" if facts.kv_dtype == AUTO else f" in {facts.kv_dtype}"
            return (
                f"needs one KV cache for both, and {prefill.name!r} and {decode.name!r} lay out K/V{kept} "
                "differently: name one for both"
            )
        return None

    def auto_skip_reason(self, facts: Facts) -> str | None:
        return self.specs[1].auto_skip_reason(facts)

    def asks_of(self, facts: Facts, options: object) -> tuple[Ask, ...]:
        return tuple(ask for spec in self.specs for ask in spec.asks)


def _pair(prefill: Any, decode: Any, named: str) -> Any:
    """Both as one, of the rank of the one that was not named."""
    first, second = prefill.declaration, decode.declaration
    assert isinstance(first, AttentionBackendSpec)
    assert isinstance(second, AttentionBackendSpec)
    features = first.features & second.features | first.features & ONLY_PREFILL | second.features & ONLY_DECODE
    features -= ONLY_ALONE
    layouts = {word: layout for word, layout in first.kv_layouts.items() if second.kv_layouts.get(word) == layout}
    spec = AttentionPairSpec(
        name=f"{prefill.name}-prefill.{decode.name}-decode",
        load="fwk_attention.pair.backend:AttentionPair",
        rank=(second if prefill.name == named else first).rank,
        summary=f"{prefill.name} for prompts, {decode.name} for next tokens.",
        kv_dtypes=tuple(word for word in first.kv_dtypes if word in layouts),
        features=features,
        kv_layouts=layouts,
        offers=first.offers & second.offers,
        made_of=(prefill, decode),
    )
    return replace(prefill, declaration=spec)


def offered(items: Sequence[Any], both: str, options: PairOptions) -> tuple[Sequence[Any], str]:
    """What an attention backend is chosen from, and the name that was asked for, or ``auto``.

    Where prompts and next tokens were given backends of their own, only what agrees with that is there to choose:
    pairs, and a backend that may be both. items: what is installed. both: the name asked for of all steps.

    Raises ``ConfigError`` for an unknown name, and for one that does nothing.
    """
    given = (options.prefill_attention_backend, options.decode_attention_backend)
    asked = [name if name != AUTO else both for name in given]
    if both not in (AUTO, *asked):
        raise ConfigError(
            f"--attention-backend {both} does nothing alongside --prefill-attention-backend {asked[0]} and "
            f"--decode-attention-backend {asked[1]}: leave it out"
        )
    if asked[0] == asked[1]:
        return items, asked[0]
    found = [[item for item in items if name in (AUTO, item.name)] for name in asked]
    for name, able in zip(asked, found, strict=True):
        if not able:
            raise ConfigError(f"unknown attention backend {name!r}: install it, or name one of those that are")
    named = next(name for name in asked if name != AUTO)
    made = [
        prefill if prefill.name == decode.name else _pair(prefill, decode, named)
        for prefill in found[0]
        for decode in found[1]
    ]
    return made, made[0].name if AUTO not in asked else AUTO


@dataclass(frozen=True, kw_only=True)
class PairsSpec(FeatureSpec):
    """Offers pairs of backends where a run names a side of one."""

    def offered(self, family: str, items: Sequence[Any], asked: str, options: PairOptions) -> tuple[Sequence[Any], str]:
        return offered(items, asked, options) if family == AttentionBackendSpec.family else (items, asked)

    def names_used(self, run: FeatureRun, options: PairOptions) -> Iterable[tuple[str, str]]:
        return ()  # they were chosen with all others

    def check_run(self, run: FeatureRun, options: PairOptions) -> None:
        if run.prompts is not None and options.decode_attention_backend != AUTO:
            what = "makes embeddings" if run.task == "embed" else f"is served to {run.task}"
            raise ConfigError(
                f"--decode-attention-backend {options.decode_attention_backend}: {run.model} {what}, and there are no "
                "next tokens"
            )


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        PairsSpec(
            name="attention_pair",
            load="fwk_attention.pair.backend:AttentionPair",
            options=PairOptions,
            runners=("generate", "pool"),
            changes_kv=False,  # the backends' names and layouts tell K/V apart
            uses=(
                (AttentionBackendSpec.family, "prefill_attention_backend"),
                (AttentionBackendSpec.family, "decode_attention_backend"),
            ),
            summary="one attention backend for prompts and another for next tokens, over one KV cache",
        )
    ]
