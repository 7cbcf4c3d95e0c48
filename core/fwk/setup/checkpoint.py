"""Find and open the model: everything that can be known of it without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from fwk.config import Config
from fwk.errors import ConfigError, ModelLoadError, PluginError, PluginFault, PluginLoadError
from fwk.features.declared import made_for
from fwk.interfaces.declaration import Facts, Host
from fwk.interfaces.loader import Checkpoint, Loader, LoaderContext, ModelSource
from fwk.interfaces.model import ModelSpec
from fwk.plugins import PluginFactory, PluginSet, Registered, choose, find, load_object
from fwk.plugins.selection import AUTO
from fwk.setup.served_as import ServedAs, served_as
from fwk.types import ModelConfig, Task
from fwk_files.config_numbers import check_config, check_token_ids


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that was found, and whose configuration has been read and checked."""

    name: str  # as the user gave it
    path: Path
    loader: str
    checkpoint: Checkpoint
    config: ModelConfig
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    served: ServedAs = ServedAs()
    reasons: tuple[str, ...] = ()  # a sentence for each better-ranked loader that could not be had

    @property
    def task(self) -> Task:
        return self.served.task

    @property
    def runner(self) -> str:
        return self.served.runner


def default_download_dir() -> Path:
    """Where fetched models are kept: ``fwk/models`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fwk" / "models"


def locate(config: Config, plugins: PluginSet, progress: Callable[[str], None]) -> Path:
    """Ask every model source for the model. Raises ``ModelLoadError`` naming those asked."""
    name = config.model.model
    folder = Path(config.model.download_dir).expanduser() if config.model.download_dir else default_download_dir()
    asked: list[str] = []
    sources: Iterator[tuple[Registered, ModelSource]] = PluginFactory(plugins, config.plugin_options).build_all(
        "model_sources", LoaderContext
    )
    for item, source in sources:
        path = source.fetch(name, config.model.revision, folder, progress)
        if path is not None:
            if not path.exists():
                raise PluginFault(f"model source {item.label} answered {path} in fetch, where there is nothing")
            return path
        asked.append(item.name)
    raise ModelLoadError(
        f"no model {name!r}: it is not a local path, and no model source knows it "
        f"({', '.join(asked) or 'none is installed'}). "
        "Give a folder with config.json and weights, a model file, or leave the model out for the default one"
    )


def num_bytes(path: Path) -> int:
    """What a model's file holds, or the files of its folder together."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())


def open_model(config: Config, plugins: PluginSet, progress: Callable[[str], None]) -> OpenedModel:
    """Locate the model, choose its loader and read its configuration."""
    path = locate(config, plugins, progress)
    name, loader, reasons = _choose_loader(config, plugins, path)
    checkpoint = loader.open(path)
    raw = {**checkpoint.config(), **json.loads(config.model.json_model_override_args)}
    check_config(raw, str(path))
    factory = PluginFactory(plugins, config.plugin_options)
    purpose = made_for(factory, checkpoint)
    spec = _model_spec(config, plugins, raw, purpose)
    model = ModelConfig.from_dict(raw if spec is None else spec.normalised(raw), str(path))
    served = served_as(config.model, spec, model, checkpoint, purpose, factory)
    if spec is not None:  # a model need not know by how many names its decoder goes
        model = replace(model, architecture=spec.decoder_of(model.architecture) or model.architecture)
    longest = model.max_position_embeddings
    most = None if served.prompts is None else served.prompts.max_length
    length = config.model.context_length or min(longest, most or longest)
    if length > longest and model.rope.kind == "default":
        raise ConfigError(f"--context-length {length} is longer than the model's {longest} positions")
    return OpenedModel(
        name=config.model.model,
        path=path,
        loader=name,
        checkpoint=checkpoint,
        config=model,
        max_model_len=length,
        eos_token_ids=_eos_ids(checkpoint, model, config.model.eos_id),
        served=served,
        reasons=reasons if served.prompts is None else (*reasons, *served.prompts.notes),
    )


def open_head(
    config: Config, plugins: PluginSet, progress: Callable[[str], None], target: ModelConfig
) -> tuple[Checkpoint, ModelConfig]:
    """Locate a checkpoint that is no whole model, and read its configuration: in full, or as additions to a target's.

    Raises ``ModelLoadError``.
    """
    path = locate(config, plugins, progress)
    checkpoint = _choose_loader(config, plugins, path)[1].open(path)
    raw = dict(checkpoint.config())
    nested = raw.get("transformer_layer_config")  # the speculators library's
    if isinstance(nested, dict):
        raw = {**cast("dict[str, Any]", nested), **raw}
    if "hidden_size" not in raw:
        raw = {**target.raw, **raw}
    raw.setdefault("vocab_size", target.vocab_size)
    raw.setdefault("max_position_embeddings", target.max_position_embeddings)
    raw["architectures"] = raw.get("architectures") or ["head"]
    return checkpoint, ModelConfig.from_dict(raw, str(path))


def _model_spec(config: Config, plugins: PluginSet, raw: Mapping[str, Any], made_for: str) -> ModelSpec | None:
    """The declaration of the plugin that will serve the model, for ``--task`` or what the checkpoint is made for.

    None if no plugin serves it: that is reported when plugins are chosen. Raises ``PluginError`` when ``--task`` names
    what no plugin does with this architecture.
    """
    names = cast("list[object]", raw.get("architectures") or [""])
    wanted, implementation = config.model.task, config.model.model_impl
    tasks = [wanted] if wanted != AUTO else [made_for, ""] if made_for else [""]
    for task in tasks:
        try:
            facts = Facts(architecture=str(names[0]), task=task)
            item = choose(plugins, "models", implementation, facts).chosen
        except PluginError:
            if wanted != AUTO:
                raise
            continue
        assert item is not None
        assert isinstance(item.declaration, ModelSpec)
        return item.declaration
    return None


def _normalised(config: Config, plugins: PluginSet, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = _model_spec(config, plugins, raw, "")
    return raw if spec is None else spec.normalised(raw)


def _choose_loader(config: Config, plugins: PluginSet, path: Path) -> tuple[str, Loader, tuple[str, ...]]:
    """The first that reads the files. Of those that lack something, it cannot be asked whether they would."""
    requested = config.model.load_format
    refusals: list[str] = []
    reasons: list[str] = []
    if requested != "auto":
        items = [find(plugins, "loaders", requested)]
    else:
        items = [item for item in plugins.family("loaders") if getattr(item.declaration, "is_automatic", True)]
        items.sort(key=lambda item: -item.declaration.rank)
    for item in items:
        lacking = item.declaration.needs.refusal(Host())
        if lacking is not None:
            refusals.append(f"{item.name} {lacking}")
            reasons.append(f"loader '{item.name}' was not taken: it {lacking}")
            continue
        try:
            refusal = _asked(item, path)
        except PluginLoadError as error:
            if requested != "auto":
                raise
            refusal = str(error)
            reasons.append(f"loader '{item.name}' was not taken: {error}")
        if refusal is None:
            factory = PluginFactory(plugins, config.plugin_options)
            loader = factory.build(item, LoaderContext, normalised=partial(_normalised, config, plugins))
            return item.name, loader, tuple(reasons)
        refusals.append(f"{item.name}: {refusal}")
    raise ModelLoadError(f"no loader reads {path} ({'; '.join(refusals) or 'none is installed'})")


def _asked(item: Registered, path: Path) -> str | None:
    """Why a loader does not read the files. Raises ``PluginLoadError`` in its name where it cannot tell."""
    try:
        return load_object(item).reads(path)
    except PluginLoadError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginLoadError(f"plugin {item.source} raised {type(error).__name__} in reads: {error}") from error


def _eos_ids(checkpoint: Checkpoint, model: ModelConfig, given: tuple[int, ...]) -> tuple[int, ...]:
    if any(not 0 <= token_id < model.vocab_size for token_id in given):
        raise ConfigError(f"--eos-id: ids of tokens are 0 to {model.vocab_size - 1} here, not {max(given)}")
    ids = {*model.eos_token_ids, *given}
    generation = checkpoint.generation_config()
    check_token_ids(generation, f"{checkpoint.path}, generation_config.json")
    more = generation.get("eos_token_id")
    ids.update(cast(list[int], more) if isinstance(more, list) else [more] if isinstance(more, int) else [])
    if not ids:  # neither a file nor the user says it: the architecture's own
        own: Any = model.raw.get("default_eos_token_id")
        ids = set(cast(list[int], own) if isinstance(own, list) else [own] if isinstance(own, int) else [])
    return tuple(sorted(i for i in ids if 0 <= i < model.vocab_size))
