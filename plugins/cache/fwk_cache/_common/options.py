"""Options of every cache that keeps a trie of blocks."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from fwk import Options, option


class EvictionOptions(Options):
    """Which blocks go first, and who is notified of them."""

    radix_eviction_policy: Literal["lru", "lfu"] = option(
        "lru",
        "Which cached blocks go first when room is needed: the least recently used, or the least frequently used (of "
        "those used equally often, the least recently used).",
    )
    kv_events_config: str | None = option(
        None,
        "Tell routers which blocks the cache holds, by vLLM's K/V events over ZeroMQ: a JSON object of endpoint "
        "(tcp://127.0.0.1:5557), topic, hwm and format: array, as SGLang has them, or map, for vLLM's router. Whoever "
        "reaches the endpoint can read the prompts.",
        stability="beta",
    )

    @field_validator("kv_events_config")
    @classmethod
    def _is_config(cls, text: str | None) -> str | None:
        if text is not None:
            from fwk_cache._common.events import read_config  # noqa: PLC0415 - options are light to import

            read_config(text)
        return text
