"""``kv_transfer_params`` of a reply, as vLLM has it: where another server finds the K/V of the prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from fwk.interfaces.dialect import OutputDelta

FEATURE = "remote_prefill"
"""Whose server part says so, with the last tokens."""


def transfer_of(delta: OutputDelta) -> dict[str, Any] | None:
    """What came with a piece of the reply."""
    said = delta.features.get(FEATURE)
    return None if said is None else msgspec.msgpack.decode(said, type=dict[str, Any])


def transfer_fields(found: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """The field of a reply, of all its prompts: lists are joined, of other values the last one stands."""
    joined: dict[str, Any] = {}
    for one in found:
        for name, value in (one or {}).items():
            joined[name] = [*joined[name], *value] if isinstance(joined.get(name), list) else value
    return {"kv_transfer_params": joined} if joined else {}
