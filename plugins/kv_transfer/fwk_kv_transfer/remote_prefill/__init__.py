"""Prefill in another server: one computes prompts, another reads their K/V, worker to worker, and decodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fwk import FeatureSpec, Limit, Options, hookimpl, option
from fwk.config import Config
from fwk.config.secrets import read_secret
from fwk.errors import ConfigError
from fwk.interfaces.feature import FeatureRun, Wire
from fwk.interfaces.prefix_cache import PrefixCacheSpec

if TYPE_CHECKING:
    from fwk_kv_transfer.remote_prefill.registry import Registry

FEATURE = "remote_prefill"

OF_DECODE = frozenset(
    ("disaggregation_prefill_servers", "disaggregation_max_retries", "disaggregation_min_prompt_tokens",
     "num_reserved_decode_tokens", "disaggregation_decode_polling_interval")
)  # fmt: skip
"""Options that only a server has which decodes."""

OF_CHOICE = ("disaggregation_max_retries", "disaggregation_min_prompt_tokens")
"""Options of one that chooses prefill servers itself: a router has chosen already, and the prompt is computed."""

OF_REPLICAS = frozenset(("data_parallel_size", "load_balance_method", "replica_slow_start"))
"""Options of pools whose engines stay where they are."""

MAX_RANKS = 1024
MAX_ROOMS = 4096
"""Of a request with as many prompts."""

MAX_PARAMS = 64

_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.%]+\]|[^/:\[\]@?#\s]+)(:[0-9]{1,5})?/?")


class RemotePrefillOptions(Options):
    """Options of ``features.remote_prefill``."""

    disaggregation_mode: Literal["null", "prefill", "decode"] = option(
        "null",
        "prefill: compute prompts for other servers. decode: answer clients, and have prompts computed by "
        "--disaggregation-prefill-servers or by those that a router has chosen. null: do both here.",
        stability="experimental",
    )
    disaggregation_prefill_servers: tuple[str, ...] = option(
        (),
        "Servers that compute prompts for this one, as http://HOST:PORT; each prompt goes to the next of them.",
        stability="experimental",
    )
    disaggregation_registry: str | None = option(
        None,
        "Where prefill servers register, and decode servers find them: file:///FOLDER, which all of them see, or "
        "etcd://HOST:PORT of an etcd, with further HOST:PORT after commas and a PREFIX of keys after a slash.",
        stability="experimental",
        min_length=1,
        max_length=4096,
    )
    disaggregation_registry_lease: float = option(
        10.0,
        "Seconds after which a prefill server that renews its entry no more is gone from the registry.",
        stability="experimental",
        ge=1,
        le=3600,
    )
    disaggregation_advertise_url: str | None = option(
        None,
        "URL at which decode servers reach this prefill server, as http://HOST:PORT: what it registers.",
        stability="experimental",
        min_length=1,
    )
    disaggregation_transfer_backend: str = option(
        "auto", "How K/V of prompts get from the one server's workers to the other's.", stability="experimental"
    )
    disaggregation_token_file: str | None = option(
        None,
        "File with a secret of 16 bytes or more, the same on all these servers (openssl rand -hex 32 makes one): "
        "without it no server can have prompts computed or read K/V.",
        stability="experimental",
        min_length=1,
    )
    disaggregation_timeout: float = option(
        30.0,
        "Seconds in which another server must have computed a prompt, and in which its K/V must have come; a decode "
        "server computes it itself then.",
        stability="experimental",
        gt=0,
        le=3600,
    )
    disaggregation_max_retries: int = option(
        1,
        "Further prefill servers that are asked for a prompt when one has failed; then the decode server computes it.",
        aliases=["pd-max-retry-count"],
        stability="experimental",
        ge=0,
        le=100,
    )
    disaggregation_min_prompt_tokens: int = option(
        64,
        "Tokens of the shortest prompt that a decode server has computed elsewhere.",
        stability="experimental",
        ge=1,
        le=2**20,
    )
    num_reserved_decode_tokens: int = option(
        512,
        "Tokens of KV cache kept free for each running sequence when a decode server begins to fetch a prompt.",
        stability="experimental",
        ge=0,
        le=2**20,
    )
    disaggregation_decode_polling_interval: int = option(
        1,
        "Steps from one look at the prompts that are being fetched to the next.",
        stability="experimental",
        ge=1,
        le=1024,
    )

    @model_validator(mode="after")
    def _are_whole(self) -> RemotePrefillOptions:
        """Refuse options that do nothing, and those that are missing."""
        mode = self.disaggregation_mode
        if mode == "null":
            return self
        for name, field in type(self).model_fields.items():
            if mode == "prefill" and name in OF_DECODE and getattr(self, name) != field.default:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is for a server of --disaggregation-mode decode: leave it out here")
        if self.disaggregation_token_file is None:
            raise ValueError(
                f"--disaggregation-mode {mode} needs --disaggregation-token-file FILE, with the same secret on all "
                "these servers: without it, anyone could read K/V of prompts (openssl rand -hex 32 > FILE makes one)"
            )
        names_none = not self.disaggregation_prefill_servers and self.disaggregation_registry is None
        for name in OF_CHOICE if mode == "decode" and names_none else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for a decode server that chooses prefill servers itself, from "
                    "--disaggregation-prefill-servers or a --disaggregation-registry: without these a router does"
                )
        for url in self.disaggregation_prefill_servers:
            _check_url("--disaggregation-prefill-servers", url)
        self._check_registry()
        return self

    def _check_registry(self) -> None:
        given, advertised = self.disaggregation_registry, self.disaggregation_advertise_url
        if given is None and self.disaggregation_registry_lease != 10.0:
            raise ValueError("--disaggregation-registry-lease is for a --disaggregation-registry: leave it out here")
        if advertised is not None:
            if self.disaggregation_mode == "decode" or given is None:
                raise ValueError(
                    "--disaggregation-advertise-url is for a server of --disaggregation-mode prefill with a "
                    "--disaggregation-registry: leave it out here"
                )
            _check_url("--disaggregation-advertise-url", advertised)
        if given is not None:
            _registry(given)
            if self.disaggregation_mode == "prefill" and advertised is None:
                raise ValueError(
                    "--disaggregation-registry needs --disaggregation-advertise-url http://HOST:PORT, at which decode "
                    "servers reach this one"
                )

    def secret(self) -> bytes:
        """What the file of ``--disaggregation-token-file`` holds. Raises ``ConfigError``."""
        if self.disaggregation_token_file is None:
            raise ConfigError("--disaggregation-token-file FILE is needed")
        return read_secret(self.disaggregation_token_file, "--disaggregation-token-file")


def _check_url(option: str, url: str) -> None:
    if not _URL.fullmatch(url):
        raise ValueError(f"{option} {url}: must be http://HOST:PORT or https://HOST:PORT")


class Heads(msgspec.Struct, array_like=True, frozen=True):
    """How ranks share the K/V heads of a model: how many each has, by layer; 0: blocks of the layer are not cut."""

    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    of_a_rank: tuple[int, ...]


class KVSource(msgspec.Struct, array_like=True, frozen=True):
    """With a request: its prompt's K/V are kept under ``key`` for ``seconds``.

    heads: how the other server's ranks share K/V heads; None: the reader is not known yet. With ``addresses``, by rank
    there and then by rank here: it has computed the first ``num_blocks`` blocks. Without any: this server is to keep
    all full blocks that it computes, until they were read. is_limited: only while it keeps little of the KV cache for
    others.
    """

    key: str
    seconds: float
    heads: Heads | None
    addresses: list[list[bytes]] = []
    num_blocks: int = 0
    is_limited: bool = False


Host = Annotated[str, Field(max_length=253)]
Port = Annotated[int, Field(ge=0, le=65535)]
Room = Annotated[int, Field(ge=0, lt=2**64)]


class RoutedFields(BaseModel):
    """Request fields by which routers pair a prefill server with a decode server; lists have an entry a prompt."""

    model_config = ConfigDict(strict=True)

    bootstrap_host: Host | Annotated[list[Host], Field(min_length=1, max_length=MAX_ROOMS)] | None = None
    bootstrap_port: Port | Annotated[list[Port | None], Field(min_length=1, max_length=MAX_ROOMS)] | None = None
    bootstrap_room: Room | Annotated[list[Room], Field(min_length=1, max_length=MAX_ROOMS)] | None = None
    kv_transfer_params: Annotated[dict[str, Any], Field(max_length=MAX_PARAMS)] | None = None


def _means(words: str) -> msgspec.Meta:
    return msgspec.Meta(description=words)


class TransferCounts(msgspec.Struct):
    """What an engine has transferred, and what is under way. Seconds count from a transfer's first byte."""

    num_kv_fetching: Annotated[int, _means("Prompts whose K/V are on their way from another server.")] = 0
    num_kv_offered: Annotated[int, _means("Prompts whose K/V are kept until another server has them.")] = 0
    kv_transfers: Annotated[int, _means("Prompts whose K/V went to another server, or came from one, whole.")] = 0
    kv_transfer_failures: Annotated[int, _means("Prompts whose K/V did not, and were computed again.")] = 0
    kv_transfer_bytes: Annotated[int, _means("Bytes of K/V that went to other servers, or came from them.")] = 0
    kv_transfer_seconds: Annotated[float, _means("What these transfers took, added up.")] = 0.0


@dataclass(frozen=True, kw_only=True)
class RemotePrefillSpec(FeatureSpec):
    """Refuses models and features whose K/V alone do not tell how a prompt continues."""

    def check_server(self, configs: Sequence[Config], options: RemotePrefillOptions) -> None:
        options.secret()
        if options.disaggregation_registry is not None:
            _registry(options.disaggregation_registry).check()
        mode = f"--disaggregation-mode {options.disaggregation_mode}"
        if len(configs) > 1:
            raise ConfigError(f"{mode} is not possible with several models (--also): start servers for each")
        if configs[0].server.take_over:
            raise ConfigError(f"{mode} is not possible with --take-over: other servers count on this one's workers")
        self._check_pools(configs[0], mode)
        for key, given in configs[0].plugin_options.items():
            if key.startswith("executors.") and str(given.get("nnodes", 1)) != "1":
                raise ConfigError(
                    f"--nnodes {given['nnodes']} is not possible with {mode}: ranks of one machine exchange K/V with "
                    "those of one other"
                )

    def _check_pools(self, config: Config, mode: str) -> None:
        """Several engines may share the work of a server. They must stay, each with an address of its own."""
        pools = {key: given for key, given in config.plugin_options.items() if key.startswith("engine_pools.")}
        for name, value in [pair for given in pools.values() for pair in given.items()]:
            if name not in OF_REPLICAS and value:
                raise ConfigError(
                    f"{mode} is not possible with --{name.replace('_', '-')}: other servers count on this one's "
                    "engines, which must stay"
                )
        several = any(str(given.get("data_parallel_size", 1)) != "1" for given in pools.values())
        for key, given in config.plugin_options.items():
            port = str(given.get("disaggregation_bootstrap_port", 0))
            if several and key.startswith("kv_transfer.") and port != "0":
                raise ConfigError(
                    f"--disaggregation-bootstrap-port {port} is not possible with --data-parallel-size: engines would "
                    "wait at the same ports; leave it out, or start a server for each engine"
                )

    def check_run(self, run: FeatureRun, options: RemotePrefillOptions) -> None:
        mode = f"--disaggregation-mode {options.disaggregation_mode}"
        if run.runner != "generate":
            raise ConfigError(f"{mode}: {run.model} does not generate, so there is nothing to decode elsewhere")
        if run.is_recurrent:
            raise ConfigError(f"{mode}: {run.model} has recurrent layers, whose states are not transferred")
        if run.has_encoder:
            raise ConfigError(
                f"{mode}: {run.model} has an encoder and a decoder, and each K/V depends on all of a prompt"
            )
        if run.media:
            kinds = " and ".join(sorted(run.media))
            raise ConfigError(
                f"{mode}: {run.model} takes {kinds}, of which a server that computes prompts for others gets none: "
                "serve text alone with --enable-multimodal false"
            )
        for how, why in run.one_server.items():
            raise ConfigError(f"{mode} is not possible with {how}: {why}")
        cache = run.chosen["cache"]
        if cache.name == "none":
            raise ConfigError(
                f"{mode} needs a prefix cache that holds what comes from the other server, and 'none' keeps nothing: "
                "choose another --prefix-cache"
            )
        tiers_lose = isinstance(cache, PrefixCacheSpec) and cache.tiers is not None and not cache.saves_evicted
        if tiers_lose and options.disaggregation_mode == "decode":
            raise ConfigError(
                f"{mode} is not possible with --prefix-cache {cache.name}: K/V that come fill blocks at once, and it "
                "copies what was in these to a tier with the next step only; give the tiers to the prefill servers"
            )


def _registry(url: str) -> Registry:
    from fwk_kv_transfer.remote_prefill.registry import open_registry  # noqa: PLC0415 - few runs name one

    return open_registry(url)


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        RemotePrefillSpec(
            name=FEATURE,
            params=RoutedFields,
            server="fwk_kv_transfer.remote_prefill.server:SharedWork",
            engine="fwk_kv_transfer.remote_prefill.engine:Transfers",
            worker="fwk_kv_transfer.remote_prefill.worker:KVExchange",
            wire=Wire(request=KVSource, stats=TransferCounts),
            options=RemotePrefillOptions,
            enabled_by=("disaggregation_mode",),
            rank=-100,  # last to see a request: what other features make of it decides who computes its prompt
            needs_server=True,
            limits=(
                Limit(
                    "pp_size", (1,), "a server's workers send the K/V of all layers; leave --pipeline-parallel-size out"
                ),
            ),
            moves_blocks="K/V go from one server to another (--disaggregation-mode)",
            changes_kv=False,
            uses=(("kv_transfer", "disaggregation_transfer_backend"),),
            summary="prompts computed by other servers (--disaggregation-mode)",
        )
    ]
