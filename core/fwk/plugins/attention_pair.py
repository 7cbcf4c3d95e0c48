"""Two attention backends in one engine, over one KV cache: one computes prompts, the other next tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fwk.config import EngineOptions
from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionBackendSpec
from fwk.interfaces.declaration import Ask, Facts
from fwk.plugins.discovery import PluginSet, Registered
from fwk.plugins.selection import AUTO, find

FAMILY = AttentionBackendSpec.family
ONLY_PREFILL = frozenset({"tree_mask"})
"""Abilities that decoding needs nothing of: steps with trees of drafts are the prefill backend's."""
ONLY_DECODE = frozenset({"graph_capture"})
"""The other way round: what is captured are decode steps."""
ONLY_ALONE = frozenset({"cross_attention"})
"""What a backend does that computes a whole step: queries whose keys are not stored with them."""


@dataclass(frozen=True, kw_only=True)
class AttentionPairSpec(AttentionBackendSpec):
    """Declares two backends as one, which can do what both can."""

    prefill: Registered
    decode: Registered

    @property
    def specs(self) -> tuple[AttentionBackendSpec, AttentionBackendSpec]:
        """Of prefill and decode."""
        prefill, decode = self.prefill.declaration, self.decode.declaration
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


def _pair(prefill: Registered, decode: Registered, named: str) -> Registered:
    """Both as one, of the rank of the one that was not named."""
    first, second = prefill.declaration, decode.declaration
    assert isinstance(first, AttentionBackendSpec)
    assert isinstance(second, AttentionBackendSpec)
    features = first.features & second.features | first.features & ONLY_PREFILL | second.features & ONLY_DECODE
    features -= ONLY_ALONE
    layouts = {word: layout for word, layout in first.kv_layouts.items() if second.kv_layouts.get(word) == layout}
    spec = AttentionPairSpec(
        name=f"{prefill.name}-prefill.{decode.name}-decode",
        load="fwk.worker.attention_pair:AttentionPair",
        rank=(second if prefill.name == named else first).rank,
        summary=f"{prefill.name} for prompts, {decode.name} for next tokens.",
        kv_dtypes=tuple(word for word in first.kv_dtypes if word in layouts),
        features=features,
        kv_layouts=layouts,
        offers=first.offers & second.offers,
        prefill=prefill,
        decode=decode,
    )
    return replace(prefill, declaration=spec)


def with_attention_pairs(plugins: PluginSet, options: EngineOptions) -> tuple[PluginSet, str]:
    """The plugins an attention backend is chosen from, and the name that was asked for, or ``auto``.

    Where prompts and next tokens were given backends of their own, only what agrees with that is there to choose:
    pairs, and a backend that may be both.

    Raises ``PluginError`` for an unknown name, ``ConfigError`` for one that does nothing.
    """
    both = options.attention_backend
    asked = [
        name if name != AUTO else both for name in (options.prefill_attention_backend, options.decode_attention_backend)
    ]
    if both not in (AUTO, *asked):
        raise ConfigError(
            f"--attention-backend {both} does nothing alongside --prefill-attention-backend {asked[0]} and "
            f"--decode-attention-backend {asked[1]}: leave it out"
        )
    if asked[0] == asked[1]:
        return plugins, asked[0]
    found = [plugins.family(FAMILY) if name == AUTO else [find(plugins, FAMILY, name)] for name in asked]
    named = next(name for name in asked if name != AUTO)
    items = [
        prefill if prefill.name == decode.name else _pair(prefill, decode, named)
        for prefill in found[0]
        for decode in found[1]
    ]
    derived = replace(plugins, by_family={**plugins.by_family, FAMILY: {item.name: item for item in items}})
    return derived, items[0].name if AUTO not in asked else AUTO


def own_options(given: Mapping[str, Mapping[str, object]], chosen: Registered) -> dict[str, Mapping[str, object]]:
    """Options without those of a pair's two plugins, which it uses."""
    spec = chosen.declaration
    used = {spec.prefill.key, spec.decode.key} if isinstance(spec, AttentionPairSpec) else set[str]()
    return {key: values for key, values in given.items() if key not in used}
