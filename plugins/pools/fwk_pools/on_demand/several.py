"""The models of one server: the first, those of ``--also``, and the list ``models`` of a ``--config`` file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from fwk.config import Config
from fwk.errors import ConfigError
from fwk_pools.on_demand import OnDemandOptions

MODELS = "models"
KEY = "engine_pools.on_demand"

OF_ONE_MODEL = frozenset(
    ("model", "served_model_name", "tokenizer_path", "tokenizer_mode", "skip_tokenizer_init", "chat_template",
     "completion_template", "revision", "eos_id", "task", "pooling_type", "classifier_from_token",
     "json_model_override_args", "preferred_sampling_params")
)  # fmt: skip
"""Options that say what one model is; so do those of LoRA adapters and drafts. All others hold for every model."""


_OWN = frozenset(OnDemandOptions.model_fields)


def _is_common(option: str) -> bool:
    return not (option in OF_ONE_MODEL | _OWN or "lora" in option or option.startswith("speculative"))


def _normal(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_")


def model_configs(
    given: Mapping[str, Any], build: Callable[[Mapping[str, Any]], Config], names: Mapping[str, str]
) -> list[Config]:
    """The configuration of each model, the first one's first; as ``EnginePoolSpec.configs``."""
    given = {_normal(name): value for name, value in given.items()}
    meant = {name: _normal(told.partition(" ")[0]) for name, told in names.items()}
    listed = [_entry(one) for one in _list(given.pop(MODELS, []))]
    if listed and "model" not in given:
        given |= listed.pop(0)
    also = given.get("also", [])
    if not listed and not also and given.get("models_memory_limit") is not None:
        raise ConfigError("--models-memory-limit is for several models: add --also NAME=MODEL, or leave it out")
    if listed:  # they turn the pool on as --also does
        given["also"] = [*(_name(one, meant) for one in listed), *(also if isinstance(also, list | tuple) else [also])]
    first = build(given)
    pool = first.plugin_options.get(KEY, {})
    own = OnDemandOptions.model_validate(pool)
    if own.enable_memory_saver and not first.server.admin_api_key:
        raise ConfigError(
            "--enable-memory-saver does nothing without --admin-api-key: add it, or leave --enable-memory-saver out"
        )
    entries = [*listed, *(_named(text) for text in own.also[len(listed) :])]
    common = {name: value for name, value in given.items() if name in meant and _is_common(meant[name])}
    of_server = {*type(first.server).model_fields, *type(first.plugins).model_fields, *_OWN}
    for entry in entries:
        if wrong := sorted(name for name in entry if meant.get(name) in of_server):
            raise ConfigError(f"--config: models: {wrong[0]} is for the whole server: write it outside the list")
    others = [build({**common, **entry}) for entry in entries]
    return [first, *(replace(one, plugin_options={**one.plugin_options, KEY: pool}) for one in others)]


def _name(entry: Mapping[str, Any], meant: Mapping[str, str]) -> str:
    """An entry of the list as ``--also`` writes it."""
    names = next((value for name, value in entry.items() if meant.get(name) == "served_model_name"), entry["model"])
    return f"{names[0] if isinstance(names, list) and names else names}={entry['model']}"


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError("--config: models must be a list of models, each a mapping of options to values")
    return cast("list[Any]", value)


def _entry(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError("--config: models must be a list of models, each a mapping of options to values")
    entry = {_normal(str(name)): one for name, one in cast("dict[Any, Any]", value).items()}
    if "model" not in entry:
        raise ConfigError(f"--config: models: an entry has no model, only {', '.join(sorted(entry)) or 'nothing'}")
    return entry


def _named(text: str) -> dict[str, Any]:
    name, equals, model = text.partition("=")
    if not (name and equals and model):
        raise ConfigError(f"--also {text}: must be NAME=MODEL, such as small=HuggingFaceTB/SmolLM2-135M-Instruct")
    return {"model": model, "served_model_name": name}
