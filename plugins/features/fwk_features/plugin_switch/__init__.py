"""Plugins exchanged while the server runs, for the families where no weight, K/V or process depends on them."""

from __future__ import annotations

from fwk import FeatureSpec, hookimpl


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="plugin_switch",
            server="fwk_features.plugin_switch.server:PluginSwitcher",
            engine="fwk_features.plugin_switch.engine:EngineSwitch",
            worker="fwk_features.plugin_switch.worker:ProcessorSwitch",
            runners=("generate", "pool"),
            changes_kv=False,
            summary="policies, logits processors, parsers, observers and dialects exchanged (POST /plugins/switch)",
        )
    ]
