"""The models of one server: the first, those of ``--also``, and the list ``models`` of a ``--config`` file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from fwk.config import Config
from fwk.errors import ConfigError
from fwk.plugins import PluginSet, build_config
from fwk.plugins.options import called, normal

MODELS = "models"

OF_ONE_MODEL = frozenset(
    ("model", "served_model_name", "tokenizer_path", "tokenizer_mode", "skip_tokenizer_init", "chat_template",
     "completion_template", "revision", "eos_id", "task", "pooling_type", "classifier_from_token",
     "json_model_override_args", "preferred_sampling_params", "also")
)  # fmt: skip
"""Options that say what one model is; so do those of LoRA adapters and drafts. All others hold for every model."""


def _is_common(option: str) -> bool:
    return not (option in OF_ONE_MODEL or "lora" in option or option.startswith("speculative"))


def model_configs(
    plugins: PluginSet, given: Mapping[str, Any], tell: Callable[[str], None] = lambda sentence: None
) -> list[Config]:
    """The configuration of each model, the first one's first. ``tell``: as for ``build_config``."""
    given = {normal(name): value for name, value in given.items()}
    entries = [_entry(one) for one in _list(given.pop(MODELS, []))]
    if entries and "model" not in given:
        given |= entries.pop(0)
    first = build_config(plugins, given, tell)
    entries += [_named(text) for text in first.server.also]
    names = {name: normal(told.partition(" ")[0]) for name, told in called(plugins).items()}
    common = {name: value for name, value in given.items() if name in names and _is_common(names[name])}
    if not entries and first.server.models_memory_limit is not None:
        raise ConfigError("--models-memory-limit is for several models: add --also NAME=MODEL, or leave it out")
    own = set(type(first.server).model_fields) | set(type(first.plugins).model_fields)
    for entry in entries:
        if wrong := sorted(name for name in entry if names.get(name) in own):
            raise ConfigError(f"--config: models: {wrong[0]} is for the whole server: write it outside the list")
    return [first, *(build_config(plugins, {**common, **entry}, tell) for entry in entries)]


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError("--config: models must be a list of models, each a mapping of options to values")
    return cast("list[Any]", value)


def _entry(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError("--config: models must be a list of models, each a mapping of options to values")
    entry = {normal(str(name)): one for name, one in cast("dict[Any, Any]", value).items()}
    if "model" not in entry:
        raise ConfigError(f"--config: models: an entry has no model, only {', '.join(sorted(entry)) or 'nothing'}")
    return entry


def _named(text: str) -> dict[str, Any]:
    name, equals, model = text.partition("=")
    if not (name and equals and model):
        raise ConfigError(f"--also {text}: must be NAME=MODEL, such as small=HuggingFaceTB/SmolLM2-135M-Instruct")
    return {"model": model, "served_model_name": name}
