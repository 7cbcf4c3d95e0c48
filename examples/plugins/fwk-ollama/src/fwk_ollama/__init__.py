"""Ollama's HTTP API."""

from __future__ import annotations

from fwk import DialectSpec, hookimpl


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="ollama",
            load="fwk_ollama.dialect:OllamaDialect",
            summary="Ollama's /api/chat and /api/generate, streams as lines of JSON",
        )
    ]
