"""The line of one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fwk.interfaces.observer import RequestRecord

METADATA, SAMPLING, BEGINNINGS, ALL = range(4)
"""Values of ``--log-requests-level``."""

Decode = Callable[[Sequence[int]], str]


def times(record: RequestRecord) -> dict[str, float | None]:
    """Seconds from arrival to the first token and to the end; tokens per second after the first."""
    first, last = record.first_token, record.last_token
    rate = None
    if first is not None and last is not None and last > first and record.num_output_tokens > 1:
        rate = round((record.num_output_tokens - 1) / (last - first), 1)
    return {
        "first_token_s": _rounded(first, record.arrived),
        "total_s": _rounded(record.finished, record.arrived),
        "tokens_per_s": rate,
    }


def fields(record: RequestRecord, level: int, max_len: int, decode: Decode) -> dict[str, Any]:
    """What a log of JSON objects tells of a request that has ended, at a level of detail."""
    found: dict[str, Any] = {
        "request_id": record.request_id,
        "label": record.label,
        "caller": record.caller,
        "operation": record.operation,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.num_output_tokens,
        "finish_reasons": list(record.finish_reasons),
        **times(record),
    }
    if level >= SAMPLING and record.sampling is not None:
        shown = msgspec.to_builtins(record.sampling)
        if level < BEGINNINGS:  # these are users' words too
            shown = {name: "(hidden)" if name in _CONTENT else value for name, value in shown.items()}
        found |= {"n": record.n, "sampling": shown}
    if level >= BEGINNINGS:
        most = None if level == ALL else max_len
        prompt = decode(list(record.prompt_token_ids)) if record.prompt_token_ids is not None else None
        found["prompt"] = _cut(prompt, most)
        found["outputs"] = [_cut(text, most) for text in record.outputs or ()]
    return found


_CONTENT = ("stop", "bad_words", "bad_word_token_ids", "grammar", "extra")


def sentence(found: dict[str, Any]) -> str:
    """The same for people."""
    name = found["label"] or found["request_id"]
    name = name if name.isprintable() else repr(name)
    whose = f" of {found['caller']}" if found["caller"] else ""
    parts = [
        f"request {name}{whose}: {found['operation']}",
        f"{found['prompt_tokens']} prompt tokens ({found['cached_tokens']} cached)",
        f"{found['output_tokens']} output tokens",
        f"ended by {', '.join(found['finish_reasons']) or 'abort'}",
    ]
    if found["first_token_s"] is not None:
        parts.append(f"first token {found['first_token_s']:.3f} s")
    if found["total_s"] is not None:
        parts.append(f"total {found['total_s']:.3f} s")
    if found["tokens_per_s"] is not None:
        parts.append(f"{found['tokens_per_s']} tok/s")
    for name in ("sampling", "prompt", "outputs"):
        if name in found:
            parts.append(f"{name} {found[name]!r}")
    return ", ".join(parts)


def _cut(text: str | None, most: int | None) -> str | None:
    if text is None or most is None or len(text) <= most:
        return text
    return f"{text[:most]}... ({len(text)} characters)"


def _rounded(end: float | None, start: float) -> float | None:
    return round(end - start, 4) if end is not None else None
