"""Core's options about servers that share the work of a request: one computes its prompt, another decodes."""

from __future__ import annotations

from typing import Literal

from fwk.config.options import Options, option


class DisaggregationOptions(Options):
    """Prefill and decode in different servers."""

    disaggregation_mode: Literal["null", "prefill", "decode"] = option(
        "null",
        "prefill: compute prompts for other servers. decode: answer clients, and have prompts computed by "
        "--disaggregation-prefill-servers. null: do both here.",
        stability="experimental",
    )
    disaggregation_prefill_servers: tuple[str, ...] = option(
        (),
        "Servers that compute prompts for this one, as http://HOST:PORT; each prompt goes to the next of them.",
        stability="experimental",
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
