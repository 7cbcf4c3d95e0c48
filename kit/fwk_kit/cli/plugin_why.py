"""``fwk plugins why FAMILY``: every candidate of a family, and why a run would or would not have it."""

from __future__ import annotations

from dataclasses import dataclass

from fwk.cli.common import warn
from fwk.config import Config
from fwk.errors import ConfigError, FwkError
from fwk.plugins import FAMILIES, Candidate, Judgement, PluginSet, Selection
from fwk.plugins.families import ORDER, PARTS
from fwk.plugins.selection import AUTO, NOWHERE, find, option_value, ranked


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate. ``refusal`` is the sentence of the log and of /server_info; None: the run can have it.

    ``variance``: why it may give a sequence other numbers in another batch; None: it does not, or does not compute.
    """

    name: str
    package: str
    rank: int
    refusal: str | None
    variance: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run takes from a family. ``error``: why it cannot start, if it cannot."""

    family: str
    requested: str
    chosen: str | None
    error: str | None
    candidates: list[Row]
    broken: list[str]


def why(plugins: PluginSet, family: str, config: Config) -> Answer:
    """Judge the plugins of a family for a run, alongside all else that the run would take.

    Without a model (``config.model.model`` is empty) what depends on one is left open. Raises ``FwkError`` for options
    that name nothing, and for a model that cannot be opened.
    """
    judgement = _judged(plugins, family, config)
    selection = judgement.selection
    rows = [
        Row(
            c.item.name,
            f"{c.item.package} {c.item.version}",
            c.item.declaration.rank,
            None if c.refusal is None else f"it {c.refusal}",
            None if c.variance is None else f"it {c.variance}",
        )
        for c in selection.candidates
    ]
    chosen = selection.chosen.name if selection.chosen is not None and judgement.error is None else None
    broken = [b.sentence() for b in plugins.broken if b.plugin.startswith(f"{family}.")]
    return Answer(family, selection.requested, chosen, judgement.error, rows, broken)


def as_text(answer: Answer) -> str:
    """For a terminal."""
    option = FAMILIES[answer.family].option
    flag = f"--{option.replace('_', '-')}" if option else ""
    if answer.requested != AUTO:
        how = f"{flag} {answer.requested} was asked for"
    elif FAMILIES[answer.family].takes_all:
        how = "all take part"
    else:
        best = next((row.name for row in answer.candidates if row.refusal is None), "none of them")
        how = f"auto would take {answer.chosen or best}" + (f" (choose with {flag})" if flag else "")
    lines = [f"{answer.family}: {how}"]
    if answer.error is not None:
        lines.append(f"  this run cannot start: {answer.error}")
    for row in answer.candidates:
        varies = "" if row.variance is None else f"; numbers may vary with the batch: {row.variance}"
        state = f"possible{varies}" if row.refusal is None else f"refused: {row.refusal}"
        lines.append(f"  {row.name:<18} rank {row.rank:<4} {row.package:<14} {state}")
    return "\n".join([*lines, *(f"  broken: {sentence}" for sentence in answer.broken)])


def _judged(plugins: PluginSet, family: str, config: Config) -> Judgement:
    from fwk.server.parsers import select_parser  # noqa: PLC0415 - a light command must not pay for it
    from fwk.setup.checkpoint import open_model  # noqa: PLC0415
    from fwk.setup.resolve import explain_family  # noqa: PLC0415
    from fwk.text import ModelText  # noqa: PLC0415

    try:
        opened = open_model(config, plugins, warn) if config.model.model else None
    except FwkError as error:
        raise ConfigError(f"--model {config.model.model}: {error}") from None
    requested = _requested(config, plugins, family)
    if family in (*ORDER, *PARTS):
        return explain_family(config, opened, plugins, family)
    if family in ("tool_parsers", "reasoning_parsers") and opened is not None:
        template = ModelText(opened.checkpoint, config.model, opened.config.vocab_size).chat_template
        return Judgement(select_parser(family, requested, plugins, template), None)
    candidates = [Candidate(item, item.declaration.needs.refusal(NOWHERE)) for item in ranked(plugins, family)]
    selection = Selection(family, requested, None, candidates)
    if requested in (AUTO, "none"):
        return Judgement(selection, None)
    item = find(plugins, family, requested)
    lacking = item.declaration.needs.refusal(NOWHERE)
    told = None if lacking is None else f"{FAMILIES[family].noun} {requested!r} cannot be used: it {lacking}"
    return Judgement(Selection(family, requested, item, candidates), told)


def _requested(config: Config, plugins: PluginSet, family: str) -> str:
    """The value of the option that chooses from the family; ``auto`` where none does."""
    value = option_value(config, plugins, FAMILIES[family].option or "")
    return value if isinstance(value, str) else AUTO
