"""Which quantisation method computes which layer: what the checkpoint holds, and what the user asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from fnmatch import fnmatchcase

from fwk.config import EngineOptions
from fwk.errors import ConfigError, ModelLoadError
from fwk.interfaces.declaration import Facts
from fwk.interfaces.loader import WeightSource
from fwk.interfaces.quant import PLAIN, LayerFormat, LayerKind, Quantization, QuantizerSpec, QuantMethod
from fwk.plugins import PluginSet, Registered, choose, find
from fwk.plugins.answers import checked

UNQUANTISED = "none"
AUTO = "auto"


class ChosenQuantization(Quantization):
    """Chooses by name, by pattern, or ``auto``: the best-ranked method that keeps the checkpoint's numbers.

    Layers that a quantised checkpoint left as they were stay so, unless a pattern names them: only a checkpoint all of
    whose layers can be read as plain numbers is quantised while loading.
    """

    def __init__(
        self,
        options: EngineOptions,
        plugins: PluginSet,
        facts: Facts,
        weights: WeightSource,
        plain: QuantMethod,
        build: Callable[[Registered], QuantMethod],
    ) -> None:
        """Raises ``PluginError`` for an unknown or impossible method, ``ModelLoadError`` for one that cannot read
        what the checkpoint holds."""
        self._plugins, self._facts, self._weights, self._build = plugins, facts, weights, build
        self._requested = options.quantization
        self._exclude = options.quantization_exclude
        splits = [text.rpartition("=") for text in options.quantization_layers]
        self._patterns = [(pattern, method) for pattern, _, method in splits]
        self._items: dict[str, Registered] = {}
        self._methods: dict[str, QuantMethod] = {UNQUANTISED: plain}
        self._matched: set[str] = set()
        self._used: Counter[str] = Counter()
        self._fallbacks: Counter[tuple[str, str]] = Counter()
        self._passed: Counter[tuple[str, str]] = Counter()
        self._stored = weights.layouts("")
        for name in {self._requested, *(method for _, method in self._patterns)} - {AUTO}:
            self._items[name] = choose(plugins, "quant", name, facts).candidates[0].item
        if self._requested != AUTO and not set(self._stored) & set(_spec(self._items[self._requested]).layouts):
            raise ModelLoadError(
                f"--quantization {self._requested} cannot read this checkpoint, whose weights are stored as "
                f"{' and '.join(self._stored)}; {self._remedy(self._stored)}"
            )

    def choose(self, prefix: str, kind: LayerKind = LayerKind.LINEAR, stored: str | None = None) -> LayerFormat:
        offered = self._weights.layouts(prefix if stored is None else stored)
        name, is_own_choice = self._asked(prefix)
        if kind is LayerKind.EMBEDDING:
            return self._embedding(prefix, name, offered)
        item, layout = (
            self._auto(prefix, offered) if name == AUTO else self._named(prefix, name, offered, is_own_choice)
        )
        self._used[item.name] += 1
        return LayerFormat(self._method(item), layout)

    def chosen(self) -> str:
        """The methods in use, that of most layers first. Raises ``ConfigError`` for a pattern that matched nothing."""
        idle = [
            text for text in (*self._exclude, *(pattern for pattern, _ in self._patterns)) if text not in self._matched
        ]
        if idle:
            raise ConfigError(
                f"quantization pattern {idle[0]!r} matches no layer of this model; names look like "
                "'model.layers.0.self_attn.q_proj' and 'lm_head', and * stands for any characters"
            )
        return ", ".join(self.used())

    def used(self) -> list[str]:
        """The names of the methods in use, that of most layers first."""
        return [name for name, _ in self._used.most_common()] or [UNQUANTISED]

    def variances(self) -> list[str]:
        """Why numbers may depend on what else a step computes, by method in use."""
        found = {
            name: _spec(self._item(name)).variance(self._facts) or self._methods[name].variance for name in self._used
        }
        return [f"quantizer '{name}' {why}" for name, why in sorted(found.items()) if why]

    def reasons(self, told: Container[str] = ()) -> list[str]:
        """A sentence for each way in which layers are computed otherwise than was asked, or ``auto`` would have.

        told: names of which it is known already that the run cannot have them.
        """
        passed = [
            f"quantizer '{name}' was not taken for {count} layers: it {why}"
            for (name, why), count in sorted(self._passed.items())
            if name not in told
        ]
        return passed + [
            f"quantizer '{name}' does not read {layout}: {count} layers are computed unpacked, as plain weights"
            for (name, layout), count in sorted(self._fallbacks.items())
        ]

    def _asked(self, prefix: str) -> tuple[str, bool]:
        """The method asked for, and whether for this layer in particular. Marks the patterns that match."""
        hits = [pattern for pattern in self._exclude if fnmatchcase(prefix, pattern)]
        found = [(pattern, name) for pattern, name in self._patterns if fnmatchcase(prefix, pattern)]
        self._matched.update(hits, (pattern for pattern, _ in found))
        if hits:
            return UNQUANTISED, True
        return (found[0][1], True) if found else (self._requested, False)

    def _auto(self, prefix: str, offered: tuple[str, ...]) -> tuple[Registered, str]:
        known = [
            (item.declaration.rank, -index, item, layout)
            for index, layout in enumerate(offered)
            for item in self._plugins.family("quant")
            if layout in _spec(item).exact
        ]
        refusals = {item.name: item.declaration.refusal(self._facts) for _, _, item, _ in known}
        possible = [reader for reader in known if refusals[reader[2].name] is None]
        readers = [reader for reader in possible if not reader[2].declaration.auto_skip_reason(self._facts)] or possible
        if not readers:
            raise ModelLoadError(
                f"{prefix} is stored as {' and '.join(offered)}, which no installed quantizer reads; "
                "convert the checkpoint, or install a plugin that declares the layout"
            )
        rank, _, item, layout = max(readers, key=lambda reader: reader[:2])
        better = {other.name for other_rank, _, other, _ in known if other_rank > rank}
        self._passed.update((name, why) for name in better if (why := refusals[name]) is not None)
        return item, layout

    def _named(self, prefix: str, name: str, offered: tuple[str, ...], is_own_choice: bool) -> tuple[Registered, str]:
        item = self._item(name)
        can_quantise = is_own_choice or PLAIN in self._stored
        for layout in offered:
            if layout in _spec(item).layouts and (layout != PLAIN or can_quantise):
                return item, layout
        if PLAIN not in offered:
            raise ModelLoadError(
                f"{prefix} is stored as {' and '.join(offered)}, which quantizer {name!r} does not read; "
                f"{self._remedy(offered)}"
            )
        if offered[0] != PLAIN:
            self._fallbacks[name, offered[0]] += 1
        elif is_own_choice:
            raise ModelLoadError(
                f"{prefix} is stored unquantised, and quantizer {name!r} reads {', '.join(_spec(item).layouts)} only; "
                "leave the layer out of --quantization-layers"
            )
        return self._item(UNQUANTISED), PLAIN

    def _embedding(self, prefix: str, name: str, offered: tuple[str, ...]) -> LayerFormat:
        """Embeddings stay packed where the method asked for can look rows up; loading never quantises them."""
        if name != AUTO or len(offered) > 1:  # with one way there is nothing to choose
            item = self._item(name) if name != AUTO else self._auto(prefix, offered)[0]
            method = self._method(item)
            for layout in offered:
                if method.can_embed and layout != PLAIN and layout in _spec(item).layouts:
                    return LayerFormat(method, layout)
        if PLAIN not in offered:
            raise ModelLoadError(
                f"{prefix} is stored as {' and '.join(offered)}, but embeddings are read unquantised only"
            )
        return LayerFormat(self._method(self._item(UNQUANTISED)), PLAIN)

    def _item(self, name: str) -> Registered:
        if name not in self._items:
            self._items[name] = find(self._plugins, "quant", name)
        return self._items[name]

    def _method(self, item: Registered) -> QuantMethod:
        if item.name not in self._methods:
            method = self._methods[item.name] = checked(item, self._build(item), apply=None, apply_rounded=None)
            method.label = f"quantizer {item.label}"
        return self._methods[item.name]

    def _remedy(self, layouts: tuple[str, ...]) -> str:
        readers = [item.name for item in self._plugins.family("quant") if set(layouts) & set(_spec(item).layouts)]
        return f"quantizers that do: {', '.join(readers) or 'none is installed'}; auto takes the right one"


def _spec(item: Registered) -> QuantizerSpec:
    assert isinstance(item.declaration, QuantizerSpec)
    return item.declaration
