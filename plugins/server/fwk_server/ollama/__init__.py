"""Ollama's HTTP API: ``/api/chat``, ``/api/generate``, ``/api/embed``, ``/api/tags``, ``/api/show``, ``/api/ps``.

A model may be named with Ollama's ``:latest``. ``options`` are read as the fields of the same meaning; those about how
a model is loaded (``num_gpu``, ``num_thread``, ...) are refused, for the server's operator decides them. What is left
out has the server's default, not Ollama's. ``keep_alive`` is ignored: the served model always stays.
"""

from fwk import DialectSpec, hookimpl


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="ollama",
            load="fwk_server.ollama.dialect:OllamaDialect",
            summary="Ollama's HTTP API: chat, generate, embed, tags, show, ps, version",
        )
    ]
