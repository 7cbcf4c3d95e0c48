"""Settle device, precision and plugins, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fwk.config import Config, EngineOptions
from fwk.errors import ConfigError, ModelLoadError, PluginError
from fwk.features.declared import check_run, declared, step_planning
from fwk.interfaces.attention import AttentionLayer
from fwk.interfaces.declaration import Facts
from fwk.interfaces.device import Device
from fwk.interfaces.executor import ExecutorSpec
from fwk.interfaces.feature import FeatureRun, FeatureSpec, StepPlanning
from fwk.plugins import (
    FAMILIES,
    Judgement,
    PluginFactory,
    PluginSet,
    Registered,
    Resolution,
    judge,
    negotiate,
    taking_part,
)
from fwk.plugins.families import ORDER, PARTS
from fwk.plugins.options import flag
from fwk.plugins.selection import (
    AUTO,
    Candidate,
    Selection,
    check_used,
    is_used,
    option_value,
    plugin_options,
    ranked,
)
from fwk.setup.checkpoint import OpenedModel
from fwk.setup.devices import ChosenDevice, choose_device

POOLED_STEP_TOKENS = 2048
"""Of a model that does not generate: it computes whole prompts, and no token waits for the step to end."""


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """An opened model on a settled device, in a settled precision, with settled plugins.

    ``reasons`` has a sentence for each way in which the run is not what ``auto`` would have liked best; ``refused``
    one for each plugin that cannot be had alongside the others, by family and name. ``max_step_tokens`` bounds a step,
    from ``max_start_tokens`` of prompts on it starts no further one, and prompts make it at most ``max_decode_gap``
    times as long.
    """

    opened: OpenedModel
    chosen_device: ChosenDevice
    factory: PluginFactory
    reasons: tuple[str, ...]
    refused: Mapping[str, Mapping[str, str]]
    max_step_tokens: int
    max_start_tokens: int
    max_decode_gap: float | None
    block_size: int

    @property
    def resolution(self) -> Resolution:
        assert self.factory.resolution is not None
        return self.factory.resolution

    @property
    def facts(self) -> Facts:
        return self.resolution.facts

    @property
    def device(self) -> Device:
        return self.chosen_device.device

    @property
    def max_model_len(self) -> int:
        return self.opened.max_model_len

    @property
    def max_sequence_len(self) -> int:
        """Places in the K/V of the longest sequence: as many as tokens, unless an encoder reads the prompt."""
        encoder = self.opened.served.encoder
        return self.max_model_len + (0 if encoder is None else encoder.max_added(self.block_size))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.opened.eos_token_ids


def resolve(config: Config, opened: OpenedModel, plugins: PluginSet) -> ModelSetup:
    """Choose device, dtype and the engine's plugins.

    Raises ``PluginError`` when no set of plugins agrees, ``ConfigError`` for options of one that was not chosen.
    """
    chosen = choose_device(config, plugins)
    facts, reasons = _facts(config, opened, plugins, chosen)
    plugins, asked = _asked(config, opened, plugins)
    resolution = negotiate(plugins, asked, facts, config.plugin_options)
    one_each = {family: name for family, name in resolution.chosen.items() if family != "quant"}  # that is by layer
    parts = [part.key for selection in resolution.selections.values() for part in _made_of(selection.chosen)]
    given = {key: values for key, values in config.plugin_options.items() if key not in parts}
    check_used(plugins, given, one_each | {"loaders": opened.loader})
    factory = PluginFactory(plugins, config.plugin_options, resolution)
    planning = step_planning(factory)
    step_tokens, start_tokens, gap = _step_tokens(config.engine, planning, opened, chosen.device)
    check_run(factory, _feature_run(config, opened, factory, step_tokens))
    parts = {family: _parts(config, plugins, resolution, family).refusals() for family in PARTS}
    for item in _using(config, plugins):
        if not item.declaration.is_meant_for(resolution.facts):
            continue
        if item.name in parts[item.family]:
            noun, why = FAMILIES[item.family].noun, parts[item.family][item.name]
            flags = "".join(f"{flag(name)}: " for name in item.declaration.enabled_by[:1])
            refused = ConfigError if flags else PluginError
            raise refused(f"{flags}{noun} {item.name!r} ({item.package}) cannot be used: {why}")
    refused = resolution.refusals() | parts
    told = (*opened.reasons, *reasons, *resolution.reasons())
    return ModelSetup(opened, chosen, factory, told, refused, step_tokens, start_tokens, gap, config.engine.page_size)


def _feature_run(config: Config, opened: OpenedModel, factory: PluginFactory, step_tokens: int) -> FeatureRun:
    """What features are asked about."""
    served = opened.served
    assert factory.resolution is not None
    return FeatureRun(
        config,
        opened.name,
        opened.runner,
        served.is_recurrent,
        served.encoder is not None,
        served.inputs,
        {family: factory.item(family).declaration for family in factory.resolution.selections},
        frozenset(item.name for item, _, _ in declared(factory)),
        {" ".join(map(flag, spec.enabled_by)): spec.one_server for _, spec, _ in declared(factory) if spec.one_server},
        served.prompts,
        _is_local(factory),
        factory.resolution.facts.model,
        step_tokens,
        factory.items,
        opened.task,
    )


def _made_of(chosen: Registered | None) -> Sequence[Registered]:
    return getattr(chosen and chosen.declaration, "made_of", ())


def _is_local(factory: PluginFactory) -> bool:
    item = factory.item("executors")
    assert isinstance(item.declaration, ExecutorSpec)
    return item.declaration.is_local(factory.options(item))


def _step_tokens(
    options: EngineOptions, planning: StepPlanning, opened: OpenedModel, device: Device
) -> tuple[int, int, float | None]:
    """``ModelSetup.max_step_tokens``, ``max_start_tokens`` and ``max_decode_gap``."""
    if opened.runner == "generate":
        defaults = device.defaults(opened.config.torch_dtype, options.max_running_requests)
        most, start, gap = defaults.step_tokens, defaults.start_tokens, defaults.decode_gap
        if opened.served.encoder is not None:  # the longest prompt, alongside those that decode
            added = opened.served.encoder.max_added(options.page_size)
            most = max(most, opened.max_model_len + added + options.max_running_requests)
    else:
        most, start, gap = POOLED_STEP_TOKENS, None, None
    step_tokens = options.max_prefill_tokens or most
    gap = gap if planning.max_decode_gap is None else planning.max_decode_gap or None
    return step_tokens, planning.max_start_tokens or start or step_tokens, gap


def explain_family(config: Config, opened: OpenedModel | None, plugins: PluginSet, family: str) -> Judgement:
    """How each plugin of a family of engines fares in such a run: in what ``settle`` would come to.

    opened: None to judge without a model; then nothing is chosen that depends on one, unless it was named.
    """
    facts, _ = _facts(config, opened, plugins, choose_device(config, plugins))
    plugins, asked = _asked(config, opened, plugins)
    if family not in PARTS:
        return judge(plugins, asked, facts, config.plugin_options, family)
    resolution = negotiate(plugins, asked, facts, config.plugin_options)
    return Judgement(_parts(config, plugins, resolution, family), None)


def _parts(config: Config, plugins: PluginSet, resolution: Resolution, family: str) -> Selection:
    """The plugins of one of ``PARTS``, held against what was settled; none of them is chosen."""
    candidates = [
        Candidate(item, resolution.refusal(item, plugin_options(item, config.plugin_options)))
        for item in ranked(plugins, family)
    ]
    return Selection(family, AUTO, None, candidates)


def _using(config: Config, plugins: PluginSet) -> Iterable[Registered]:
    """The plugins of ``PARTS`` that this run uses, but for those that features choose by name."""
    for family in PARTS:
        if not FAMILIES[family].takes_all or not is_used(config, plugins, family):
            continue
        for item, _ in taking_part(plugins, family, config.plugin_options, host=None):
            if family != "features" or item.declaration.enabled_by:  # else it is left out of a run that it refuses
                yield item


def _facts(
    config: Config, opened: OpenedModel | None, plugins: PluginSet, device: ChosenDevice
) -> tuple[Facts, list[str]]:
    """What is known of the run before plugins are chosen, and what is not as ``auto`` would have liked it."""
    engine = config.engine
    facts = Facts(
        host=device.host,
        dtype="float32" if config.model.dtype == AUTO else config.model.dtype,
        kv_dtype=engine.kv_cache_dtype,
        block_size=engine.page_size,
        tp_size=engine.tensor_parallel_size,
        pp_size=engine.pipeline_parallel_size,
        is_deterministic=engine.enable_deterministic_inference,
        chosen={"quant": tuple(text.rpartition("=")[2] for text in engine.quantization_layers)},
    )
    for _, spec, options in declared(PluginFactory(plugins, config.plugin_options)):
        facts = spec.known(facts, options)
    if opened is None:
        return facts, []
    reasons: list[str] = []
    dtype = config.model.dtype
    if dtype == AUTO:
        defaults = device.device.defaults(opened.config.torch_dtype, engine.max_running_requests)
        dtype = defaults.dtype
        if defaults.why:
            reasons.append(defaults.why)
    if opened.served.encoder is not None:
        _check_encoder(engine, opened)
    if engine.pipeline_parallel_size > 1 and (why := _undivided(engine, opened, device)):
        raise ConfigError(f"--pipeline-parallel-size {engine.pipeline_parallel_size} is not possible: {why}")
    if engine.enable_deterministic_inference and (why := variance(engine, opened)):
        raise ConfigError(f"--enable-deterministic-inference is not possible: {why}")
    layouts = opened.checkpoint.weights().layouts("")
    _check_readable(engine, opened, plugins, layouts)
    architecture, task = opened.config.architecture, opened.task
    facts = replace(facts, dtype=dtype, architecture=architecture, task=task, layouts=layouts, model=opened.config)
    return facts, reasons


def _check_readable(options: EngineOptions, opened: OpenedModel, plugins: PluginSet, layouts: tuple[str, ...]) -> None:
    """Refuse weights that ``auto`` finds no quantizer for: they are stored in a way nobody here knows."""
    known = {layout for item in plugins.family("quant") for layout in getattr(item.declaration, "exact", ())}
    if options.quantization == AUTO and plugins.family("quant") and not known & set(layouts):
        raise ModelLoadError(
            f"{opened.name}: the weights are stored as {' and '.join(layouts)}, which no installed quantizer reads; "
            "convert the checkpoint, or install a plugin that declares the layout"
        )


def _asked(config: Config, opened: OpenedModel | None, plugins: PluginSet) -> tuple[PluginSet, dict[str, str]]:
    """What there is to choose from, and what was asked for of each family."""
    asked = requested_plugins(config, opened, plugins)
    for _, spec, options in declared(PluginFactory(plugins, config.plugin_options)):
        for family in asked if type(spec).offered is not FeatureSpec.offered else ():
            items, asked[family] = spec.offered(family, plugins.family(family), asked[family], options)
            plugins = replace(plugins, by_family={**plugins.by_family, family: {item.name: item for item in items}})
    return plugins, asked


def requested_plugins(config: Config, opened: OpenedModel | None, plugins: PluginSet) -> dict[str, str]:
    """What was asked for of each family that an engine for the model uses: a plugin's name, or ``auto``."""
    found: dict[str, str] = {}
    for family in ORDER:
        if is_used(config, plugins, family):
            found[family] = str(option_value(config, plugins, FAMILIES[family].option or ""))
    if config.model.skip_tokenizer_init and found["grammar"] not in (AUTO, "none"):
        raise ConfigError(
            f"--grammar-backend {found['grammar']}: grammars are of text, and --skip-tokenizer-init leaves the server "
            "without a tokenizer; leave one out"
        )
    has_grammars = bool(plugins.family("grammar")) and not config.model.skip_tokenizer_init
    idle = {
        "speculative": found["speculative"] == "none",
        "grammar": found["grammar"] == "none" or (found["grammar"] == AUTO and not has_grammars),
        "moe": found["moe"] == AUTO and (opened is None or not opened.config.num_experts),
        "models": opened is None,
        "quant": opened is None and found["quant"] == AUTO,
    }
    if opened is not None and opened.served.needs_whole_prompts:
        found["cache"] = "none"  # nothing is left behind to be found
    return {family: name for family, name in found.items() if not idle.get(family)}


def check_quantizers(used: Sequence[str], resolution: Resolution) -> None:
    """Hold what was chosen with one quantizer in mind against those that the layers got in the end.

    Raises ``PluginError`` when one of the choices cannot serve alongside them.
    """
    named = {"quant": tuple(dict.fromkeys((*used, *resolution.facts.chosen["quant"])))}
    resolution.check(replace(resolution.facts, chosen={**resolution.facts.chosen, **named}))


def variance(options: EngineOptions, opened: OpenedModel) -> str:
    """Why numbers depend on what a step computes, of what no plugin is asked about; empty: they do not."""
    if opened.served.is_recurrent:
        return f"{opened.name} has recurrent layers, whose states depend on how a prompt is cut"
    if opened.served.needs_whole_prompts:
        return f"{opened.name} computes prompts whole, by products whose order depends on their number"
    if options.tensor_parallel_size > 1:
        return "ranks add up their parts in an order of torch.distributed's own: leave --tensor-parallel-size out"
    return ""


def _undivided(options: EngineOptions, opened: OpenedModel, device: ChosenDevice) -> str:
    """Why a model's layers cannot be divided into stages; empty: nothing that is known before it is built."""
    if not device.device.is_host:
        return f"stages hand hidden states on in the host's memory, and --device {device.name} has its own"
    if opened.runner != "generate":
        return f"stages are of models that generate, and --task {opened.task} makes something else of prompts"
    if opened.served.encoder is not None:
        return f"{opened.name} has an encoder and a decoder, and stages are of decoders alone"
    if opened.served.is_recurrent:
        return f"{opened.name} has recurrent layers, whose states one worker keeps and saves"
    if opened.config.num_layers < options.pipeline_parallel_size:
        return f"{opened.name} has {opened.config.num_layers} layers, and each stage needs one"
    return ""


def _check_encoder(options: EngineOptions, opened: OpenedModel) -> None:
    """Refuse what does not go with an encoder that reads the prompt."""
    why = "and each K/V of a prompt depends on all of it"
    refused: list[tuple[str, tuple[Any, ...], str]] = [("prefix_cache", ("auto", "none"), why)]
    _refuse(options, refused, f"{opened.name} has an encoder and a decoder")


def _refuse(options: EngineOptions, refused: Sequence[tuple[str, tuple[Any, ...], str]], what: str) -> None:
    """Raise ``ConfigError`` for the first option whose value is none of those that do nothing. what: the model is."""
    for option, idle, why in refused:
        value = getattr(options, option)
        if value not in idle:
            shown = "" if value is True else f" {value}"
            raise ConfigError(f"--{option.replace('_', '-')}{shown}: {what}, {why}")


def check_layers(layers: Sequence[AttentionLayer], attention: Registered, facts: Facts) -> None:
    """Hold the layers that were built against the backend that was chosen by what the configuration promised.

    Raises ``ConfigError`` for the first that is beyond it.
    """
    for layer in layers:
        needed = facts.features | layer.features
        refusal = attention.declaration.refusal(replace(facts, head_size=layer.head_size, features=needed))
        if refusal is not None:
            name = f" ({layer.prefix})" if layer.prefix else ""
            raise ConfigError(
                f"attention backend {attention.name!r} cannot serve layer {layer.index}{name} of this model: "
                f"it {refusal}"
            )
