"""The features of a run, and what they declare of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fwk.config import Config
from fwk.errors import ConfigError
from fwk.interfaces.feature import FeatureRun, FeatureSpec, PromptModel, PromptsServed, StatesKept, StepPlanning
from fwk.interfaces.loader import Checkpoint
from fwk.interfaces.model import ModelSpec
from fwk.plugins import PluginFactory, PluginSet, Registered, choose, taking_part
from fwk.plugins.pools import refuse_pools


def declared(factory: PluginFactory) -> Iterator[tuple[Registered, FeatureSpec, Any]]:
    """Each feature that is on, best rank first, with its validated options; judged when the run was settled."""
    for item, options in taking_part(factory.plugins, "features", factory.given, host=None):
        spec, run = item.declaration, factory.resolution
        assert isinstance(spec, FeatureSpec)
        if run is None or spec.enabled_by or run.refusal(item, options) is None:
            yield item, spec, options


def moved_by(factory: PluginFactory) -> str:
    """Why K/V leave an engine or come from elsewhere (``FeatureSpec.moves_blocks``); empty: they do not."""
    return next((spec.moves_blocks for _, spec, _ in declared(factory) if spec.moves_blocks), "")


def states_kept(factory: PluginFactory) -> StatesKept:
    """How many states of recurrent layers are kept."""
    found = (spec.states_kept(options) for _, spec, options in declared(factory))
    return next((kept for kept in found if kept is not None), StatesKept())


def step_planning(factory: PluginFactory) -> StepPlanning:
    """How steps are planned."""
    found = (spec.step_planning(options) for _, spec, options in declared(factory))
    return next((one for one in found if one is not None), StepPlanning())


def inputs_of(factory: PluginFactory, model: ModelSpec) -> frozenset[str]:
    """Of the kinds of input besides text that a model takes, those that features bring."""
    found = [spec.takes(model.media, options) for _, spec, options in declared(factory)] if model.media else []
    return frozenset[str]().union(*found)


def made_for(factory: PluginFactory, checkpoint: Checkpoint) -> str:
    """The task that a checkpoint says it was made for; empty: it does not say."""
    return next((task for _, spec, _ in declared(factory) if (task := spec.made_for(checkpoint))), "")


def prompts_served(factory: PluginFactory, model: PromptModel) -> PromptsServed:
    """What a feature makes of a model's prompts. Raises ``ConfigError``, also where none is on that makes anything."""
    found = (spec.serves(model, options) for _, spec, options in declared(factory))
    made = next((one for one in found if one is not None), None)
    if made is None:
        raise ConfigError(
            f"--task {model.task}: no feature that is installed and on makes anything of the prompts of {model.name}, "
            "which does not generate for it (fwk plugins list): install one, or serve it with --task generate"
        )
    return made


def check_run(factory: PluginFactory, run: FeatureRun) -> None:
    """Raise ``ConfigError`` for a settled run that one cannot be in, ``PluginError`` without a plugin that it uses."""
    assert factory.resolution is not None
    for _, spec, options in declared(factory):
        for family, name in spec.names_used(run, options):
            choose(factory.plugins, family, name, factory.resolution.facts)
        spec.check_run(run, options)
    cache = run.chosen["cache"]
    if getattr(cache, "tiers", None) is not None and not any(spec.transfer for _, spec, _ in declared(factory)):
        raise ConfigError(
            f"--prefix-cache {cache.name} keeps K/V in cache tiers, and no feature that is installed and on brings "
            "them there (fwk plugins list): install one, or choose another prefix cache"
        )


def check_server(configs: Sequence[Config], plugins: PluginSet) -> None:
    """Raise ``ConfigError`` for a server that one cannot be in."""
    for _, spec, options in declared(PluginFactory(plugins, configs[0].plugin_options)):
        refuse_pools(plugins, configs[0], spec.one_engine(options))
        spec.check_server(configs, options)
