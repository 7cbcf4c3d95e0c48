"""What /server_info says of options and plugins."""

from __future__ import annotations

from typing import Any

from fwk import __version__
from fwk.config import Config
from fwk.config.secrets import without_secrets
from fwk.plugins import PluginSet, option_owners
from fwk.plugins.selection import is_named
from fwk_http.keys import Keys


def describe(config: Config, plugins: PluginSet, keys: Keys) -> dict[str, Any]:
    """What runs here, as it was configured. No secrets."""
    server, given = config.server, config.plugin_options
    held = {"has_api_key": bool(keys.for_users), "has_admin_api_key": bool(server.admin_api_key)}
    return {
        "version": __version__,
        "model_path": config.model.model,
        "served_model_name": (config.model.served_model_name or (config.model.model,))[0],
        "model_options": without_secrets(type(config.model), config.model.model_dump()),
        "engine": without_secrets(type(config.engine), config.engine.model_dump()),
        "server": without_secrets(type(server), server.model_dump()) | held,
        "plugin_options": {
            owner.key: without_secrets(owner.model, given[owner.key])
            for owner in option_owners(plugins)
            if owner.key in given
        },
        "fingerprint": plugins.fingerprint,
        "plugins_lock": config.plugins.plugins_lock,
        "plugins": [f"{item.key} {item.package} {item.version}" for item in plugins.all()],
        "plugins_off": [item.key for item in plugins.all() if not is_named(item, given)],
        "touches": {item.key: sorted(item.declaration.touches) for item in plugins.all() if item.declaration.touches},
        "undeclared": list(plugins.undeclared.values()),
        "broken_plugins": [broken.sentence() for broken in plugins.broken],
    }
