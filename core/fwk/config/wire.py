"""A resolved configuration as plain data, for sending to another process."""

from __future__ import annotations

from typing import Any

from fwk.config.core import Config, PluginOptions
from fwk.config.engine import EngineOptions
from fwk.config.model import ModelOptions
from fwk.config.options import is_secret
from fwk.config.server import ServerOptions

_SECRETS = {name for name, field in ServerOptions.model_fields.items() if is_secret(field)}


def to_plain(config: Config) -> dict[str, Any]:
    """Only JSON types; secrets stay at home."""
    return {
        "model": config.model.model_dump(mode="json"),
        "engine": config.engine.model_dump(mode="json"),
        "server": config.server.model_dump(mode="json", exclude=_SECRETS),
        "plugins": config.plugins.model_dump(mode="json"),
        "plugin_options": {key: dict(values) for key, values in config.plugin_options.items()},
        "seed": config.seed,
    }


def from_plain(plain: dict[str, Any]) -> Config:
    """The inverse of ``to_plain``; validates again."""
    return Config(
        model=ModelOptions.model_validate(plain["model"]),
        engine=EngineOptions.model_validate(plain["engine"]),
        server=ServerOptions.model_validate(plain["server"]),
        plugins=PluginOptions.model_validate(plain["plugins"]),
        plugin_options=plain["plugin_options"],
        seed=plain["seed"],
    )
