"""What cannot be where prefill and decode are in different servers, told before anything is loaded or served."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fwk.config import Config
from fwk.config.disaggregation import DisaggregationOptions
from fwk.config.secrets import read_secret
from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import PrefixCacheSpec
from fwk.plugins import PluginSet
from fwk.plugins.selection import choose
from fwk.setup.resolve import ModelSetup

OF_DECODE = frozenset(
    ("disaggregation_prefill_servers", "disaggregation_max_retries", "disaggregation_min_prompt_tokens",
     "num_reserved_decode_tokens", "disaggregation_decode_polling_interval")
)  # fmt: skip
"""Options that only a server has which decodes."""

_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.%]+\]|[^/:\[\]@?#\s]+)(:[0-9]{1,5})?/?")


def check_disaggregation_options(config: Config) -> None:
    """Raise ``ConfigError`` for options that do nothing, and for those that are missing."""
    engine = config.engine
    mode = engine.disaggregation_mode
    fields = {name: field.default for name, field in DisaggregationOptions.model_fields.items()}
    given = [name for name, default in fields.items() if getattr(engine, name) != default]
    given += [name for key, one in config.plugin_options.items() if key.startswith("kv_transfer.") for name in one]
    for name in given:
        option = f"--{name.replace('_', '-')}"
        if mode == "null":
            raise ConfigError(
                f"{option} is for prefill and decode in different servers: add --disaggregation-mode, or leave it out"
            )
        if mode == "prefill" and name in OF_DECODE:
            raise ConfigError(f"{option} is for a server of --disaggregation-mode decode: leave it out here")
    if mode == "null":
        return
    if engine.disaggregation_token_file is None:
        raise ConfigError(
            f"--disaggregation-mode {mode} needs --disaggregation-token-file FILE, with the same secret on all these "
            "servers: without it, anyone could read K/V of prompts (openssl rand -hex 32 > FILE makes one)"
        )
    read_secret(engine.disaggregation_token_file, "--disaggregation-token-file")
    if mode == "decode" and not engine.disaggregation_prefill_servers:
        raise ConfigError(
            "--disaggregation-mode decode needs --disaggregation-prefill-servers http://HOST:PORT, which compute its "
            "prompts"
        )
    for url in engine.disaggregation_prefill_servers:
        if not _URL.fullmatch(url):
            raise ConfigError(f"--disaggregation-prefill-servers {url}: must be http://HOST:PORT or https://HOST:PORT")


def check_disaggregated_server(configs: Sequence[Config]) -> None:
    """Raise ``ConfigError`` for a server that cannot share its work with others."""
    check_disaggregation_options(configs[0])
    engine, server = configs[0].engine, configs[0].server
    mode = f"--disaggregation-mode {engine.disaggregation_mode}"
    if engine.disaggregation_mode == "null":
        return
    if engine.data_parallel_size > 1:
        raise ConfigError(
            f"{mode} is not possible with --data-parallel-size {engine.data_parallel_size}: start a server for each "
            "engine, and name all that compute prompts in --disaggregation-prefill-servers"
        )
    if len(configs) > 1:
        raise ConfigError(f"{mode} is not possible with several models (--also): start servers for each")
    for name in ("take_over", "idle_timeout", "enable_memory_saver"):
        if getattr(server, name):
            raise ConfigError(
                f"{mode} is not possible with --{name.replace('_', '-')}: other servers count on this one's workers"
            )


def check_disaggregated(config: Config, plugins: PluginSet, setup: ModelSetup) -> None:
    """Raise ``ConfigError`` for a model or a feature whose K/V alone do not tell how a prompt continues."""
    engine, opened = config.engine, setup.opened
    if engine.disaggregation_mode == "null":
        return
    mode = f"--disaggregation-mode {engine.disaggregation_mode}"
    choose(plugins, "kv_transfer", engine.disaggregation_transfer_backend, setup.facts)
    if opened.runner != "generate":
        raise ConfigError(f"{mode}: {opened.name} does not generate, so there is nothing to decode elsewhere")
    if opened.served.is_recurrent:
        raise ConfigError(f"{mode}: {opened.name} has recurrent layers, whose states are not transferred")
    if opened.served.encoder is not None:
        raise ConfigError(
            f"{mode}: {opened.name} has an encoder and a decoder, and each K/V depends on all of a prompt"
        )
    if opened.served.media:
        kinds = " and ".join(sorted(opened.served.media))
        raise ConfigError(
            f"{mode}: {opened.name} takes {kinds}, of which a server that computes prompts for others gets none: serve "
            "text alone with --enable-multimodal false"
        )
    if engine.enable_lora:
        raise ConfigError(f"{mode} is not possible with --enable-lora: adapters are of one server alone")
    cache = setup.resolution.item("cache")
    assert isinstance(cache.declaration, PrefixCacheSpec)
    if cache.name == "none" or cache.declaration.tiers is not None:
        why = "keeps nothing" if cache.name == "none" else "moves blocks to tiers"
        raise ConfigError(
            f"{mode} needs a prefix cache that holds what comes from the other server, and '{cache.name}' {why}: "
            "choose another --prefix-cache"
        )
