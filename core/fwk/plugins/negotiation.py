"""Choose from all families of an engine together: what one choice asks, another must offer.

Each declaration says by itself what it cannot serve (``Declaration.refusal``, ``limits``), what it asks of other
families' choices (``asks``) and what it offers to them (``offers``). The resolution is the best that agrees with all of
it: families in the order of ``ORDER``, the best rank first in each; what the user named is not up for choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fwk.errors import PluginError
from fwk.interfaces.declaration import DETERMINISTIC, Ask, Facts
from fwk.plugins.discovery import PluginSet, Registered
from fwk.plugins.families import COMPUTING, FAMILIES, ORDER
from fwk.plugins.selection import AUTO, Candidate, Selection, find, none_possible, plugin_options, ranked

Choices = dict[str, Registered]
_Judged = tuple[Registered, Any, str | None]


@dataclass(frozen=True, slots=True)
class Resolution:
    """What an engine is made of, by family, and the facts of the run with all of it in place."""

    facts: Facts
    selections: Mapping[str, Selection]
    _judged: dict[str, _Judged] = field(default_factory=dict[str, _Judged], init=False, compare=False)

    def item(self, family: str) -> Registered:
        """The plugin chosen from a family that is in use."""
        chosen = self.selections[family].chosen
        assert chosen is not None, "a resolution has a choice for every family in use"
        return chosen

    @property
    def chosen(self) -> dict[str, str]:
        """The plugins' names, by family."""
        return {family: self.item(family).name for family in self.selections}

    def refusal(self, item: Registered, options: Any) -> str | None:
        """Why a plugin cannot join what is settled, or take the place of its family's choice; None when it can.

        options: its own, validated.
        """
        if item.key in self._judged and self._judged[item.key][:2] == (item, options):
            return self._judged[item.key][2]
        others = [self.item(family) for family in self.selections if family != item.family]
        facts = replace(self.facts, chosen={**self.facts.chosen, item.family: (item.name,)})
        facts = item.declaration.facts_with(facts, options)
        unanswered = _unanswered(item.declaration.asks_of(facts, options), others, self.selections)
        why = unanswered or item.declaration.refusal(facts) or _objection(others, facts)
        self._judged[item.key] = item, options, why
        return why

    def check(self, facts: Facts) -> None:
        """Raise ``PluginError`` if a choice cannot serve the run as it turned out to be."""
        why = _objection([self.item(family) for family in self.selections], facts)
        if why is not None:
            raise PluginError(f"the run {why}")

    def reasons(self) -> list[str]:
        """A sentence for every fallback: each better-ranked plugin that ``auto`` had to leave."""
        return [reason for selection in self.selections.values() for reason in selection.reasons()]

    def refusals(self) -> dict[str, dict[str, str]]:
        """Why each plugin that was looked at could not be had, by family and name."""
        return {family: selection.refusals() for family, selection in self.selections.items()}


def negotiate(
    plugins: PluginSet, wanted: Mapping[str, str], facts: Facts, options: Mapping[str, Mapping[str, object]]
) -> Resolution:
    """Settle the families of ``wanted``: a plugin's name each, or ``auto``. Families left out are not used.

    facts: of the run; ``chosen`` holds what is in use alongside the choices (methods of single layers, for ``quant``).
    options: ``Config.plugin_options``; what a plugin asks may depend on its own. Raises ``PluginError`` with one
    sentence when a plugin is unknown, or when nothing agrees.
    """
    return _Negotiation(plugins, wanted, facts, options).resolve()


@dataclass(frozen=True, slots=True)
class Judgement:
    """How each plugin of a family fares in a run. ``error``: why nothing agrees, if nothing does."""

    selection: Selection
    error: str | None


def judge(
    plugins: PluginSet,
    wanted: Mapping[str, str],
    facts: Facts,
    options: Mapping[str, Mapping[str, object]],
    family: str,
) -> Judgement:
    """Hold each plugin of a family against the other choices; as ``negotiate``, which need not have used the family.

    When nothing agrees: against what was named, and the choices with which that was found out. Raises ``PluginError``
    for unknown names.
    """
    return _Negotiation(plugins, wanted, facts, options).judge(family)


def _objection(others: Iterable[Registered], facts: Facts) -> str | None:
    """Which of the others cannot serve such a run, and why."""
    for other in others:
        why = other.declaration.refusal(facts)
        if why is not None:
            return f"does not go with {_name(other)}, which {why}"
    return None


def _unanswered(asks: Iterable[Ask], others: Iterable[Registered], used: Iterable[str]) -> str | None:
    """What is asked of others that they do not offer, or of a family that is not used."""
    by_family = {other.family: other for other in others}
    for ask in asks:
        other = by_family.get(ask.family)
        if other is not None and not ask.features <= other.declaration.abilities():
            lacking = ask.features - other.declaration.abilities()
            return f"asks {_name(other)} for {_listed(lacking)}, which it lacks"
        if ask.family not in used:
            noun = FAMILIES[ask.family].noun
            return f"asks a {noun} for {_listed(ask.features)}, and this run uses none"
    return None


class _Negotiation:
    """One search for a resolution."""

    def __init__(
        self, plugins: PluginSet, wanted: Mapping[str, str], facts: Facts, options: Mapping[str, Mapping[str, object]]
    ) -> None:
        self._plugins = plugins
        self._wanted = wanted
        idle = {family: () for family in ORDER if family not in wanted}
        given = {family: names for family, names in facts.chosen.items() if names}  # else nothing is known yet
        drafts = "" if "speculative" in wanted else "none"
        self._facts = replace(facts, drafts=drafts, chosen={**idle, **given})
        self._options = options
        self._own: dict[str, Any] = {}
        self._alone: dict[str, str | None] = {}
        named = [family for family in ORDER if wanted.get(family, AUTO) != AUTO]
        self._order = [*named, *(family for family in ORDER if wanted.get(family) == AUTO)]
        self._candidates = {
            family: ranked(plugins, family) if wanted[family] == AUTO else [find(plugins, family, wanted[family])]
            for family in self._order
        }
        self._deadlock: tuple[int, str, Choices] = (-1, "", {})

    def resolve(self) -> Resolution:
        found = next(self._search({}), None)
        if found is None:
            raise PluginError(self._why_not())
        if (displaced := self._displaced_model(found)) is not None:
            raise PluginError(displaced[1])
        facts = self._facts_of(found)
        return Resolution(
            facts, {family: self._selection(family, found) for family in ORDER if family in self._candidates}
        )

    def judge(self, family: str) -> Judgement:
        found = next(self._search({}), None)
        if found is not None:
            displaced = self._displaced_model(found)
            if displaced is None:
                return Judgement(self._selection(family, found), None)
            return Judgement(self._selection(family, {**found, "models": displaced[0]}), displaced[1])
        named = {asked: items[0] for asked, items in self._candidates.items() if self._wanted[asked] != AUTO}
        return Judgement(self._selection(family, {**self._deadlock[2], **named}), self._why_not())

    def _search(self, chosen: Choices) -> Iterator[Choices]:
        """Every way to complete ``chosen``, the best first."""
        left = [family for family in self._order if family not in chosen]
        possible = {family: (item for item in self._candidates[family] if self._fits(item, chosen)) for family in left}
        first = {family: next(items, None) for family, items in possible.items()}
        for family in left:
            if first[family] is None:  # whatever is chosen from the others: it only gets harder
                if len(chosen) > self._deadlock[0]:
                    self._deadlock = (len(chosen), family, dict(chosen))
                return
        if not left:
            yield chosen
            return
        item = first[left[0]]
        while item is not None:
            yield from self._search({**chosen, left[0]: item})
            item = next(possible[left[0]], None)

    def _displaced_model(self, found: Choices) -> tuple[Registered, str] | None:
        """The model plugin that ``auto`` would take but for a plugin that was named, and why the two disagree.

        Who names a backend means it to compute the model as it is, not as another plugin may do it, too.
        """
        if self._wanted.get("models") != AUTO:
            return None
        better = self._candidates["models"][: self._candidates["models"].index(found["models"])]
        for model in better:
            if model.declaration.refusal(self._facts) or self._undetermined(model):
                continue
            for family, item in found.items():
                why = self._refusal(item, {"models": model}) if self._wanted[family] != AUTO else None
                if why is not None:
                    return model, _cannot(item, why)
        return None

    def _fits(self, item: Registered, chosen: Choices) -> bool:
        return self._refusal(item, chosen) is None

    def _refusal(self, item: Registered, chosen: Choices) -> str | None:
        """Why ``item`` cannot be taken alongside what is chosen from other families; None when it can."""
        alongside = {family: other for family, other in chosen.items() if family != item.family}
        if item.key not in self._alone:
            self._alone[item.key] = item.declaration.refusal(self._facts) or self._undetermined(item)
        if (why := self._alone[item.key]) is not None:  # it may not even be able to say what it would ask
            return why
        together = {**alongside, item.family: item}
        facts = self._facts_of(together)
        asks = item.declaration.asks_of(facts, self._options_of(item))
        why = self._unasked(item, alongside, facts) or _unanswered(asks, alongside.values(), self._wanted)
        why = why or item.declaration.refusal(facts)
        if why is None and self._wanted.get(item.family, AUTO) == AUTO:
            why = item.declaration.auto_skip_reason(facts)
        return why or _objection(alongside.values(), facts)

    def _undetermined(self, item: Registered) -> str | None:
        """Why a plugin cannot take part in a deterministic run, and which others of its family can."""
        if not self._facts.is_deterministic or item.family not in COMPUTING:
            return None
        if DETERMINISTIC in item.declaration.offers:
            return None
        able = [other.name for other in self._plugins.family(item.family) if DETERMINISTIC in other.declaration.offers]
        return (
            "does not promise the same numbers whatever is computed alongside (--enable-deterministic-inference); of "
            f"its family {' and '.join(able) or 'none'} can"
        )

    def _unasked(self, item: Registered, others: Choices, facts: Facts) -> str | None:
        """What ``item`` lacks of that which others ask of it."""
        for other in others.values():
            for ask in other.declaration.asks_of(facts, self._options_of(other)):
                lacking = ask.features - item.declaration.abilities() if ask.family == item.family else None
                if lacking:
                    return f"lacks {_listed(lacking)}, which {_name(other)} asks for"
        return None

    def _facts_of(self, chosen: Choices) -> Facts:
        names = {family: (item.name, *self._facts.chosen.get(family, ())) for family, item in chosen.items()}
        facts = replace(self._facts, chosen={**self._facts.chosen, **names})
        for item in chosen.values():
            facts = item.declaration.facts_with(facts, self._options_of(item))
        return facts

    def _options_of(self, item: Registered) -> Any:
        if item.key not in self._own:
            self._own[item.key] = plugin_options(item, self._options)
        return self._own[item.key]

    def _selection(self, family: str, chosen: Choices) -> Selection:
        """Each candidate of a family, judged alongside everything else that was settled."""
        facts = self._facts_of(chosen)
        candidates = [
            Candidate(
                item,
                self._refusal(item, chosen),
                item.declaration.is_meant_for(facts),
                item.declaration.variance(facts) if family in COMPUTING else None,
            )
            for item in ranked(self._plugins, family)
        ]
        return Selection(family, self._wanted.get(family, AUTO), chosen.get(family), candidates)

    def _why_not(self) -> str:
        _, family, chosen = self._deadlock
        items = self._candidates[family]
        if self._wanted[family] != AUTO:
            return _cannot(items[0], self._refusal(items[0], chosen))
        meant = [item for item in items if item.declaration.is_meant_for(self._facts)]
        return none_possible(
            self._plugins, family, [Candidate(item, self._refusal(item, chosen)) for item in meant or items]
        )


def _name(item: Registered) -> str:
    return f"{FAMILIES[item.family].noun} {item.name!r}"


def _cannot(item: Registered, why: str | None) -> str:
    return f"{_name(item)} ({item.package}) cannot be used: it {why}"


def _listed(features: Iterable[str]) -> str:
    return ", ".join(sorted(features))
