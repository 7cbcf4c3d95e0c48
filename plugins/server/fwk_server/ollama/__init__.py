"""Ollama's HTTP API: ``/api/chat``, ``/api/generate``, ``/api/embed``, ``/api/tags``, ``/api/show``, ``/api/ps``.

A model may be named with Ollama's ``:latest``. ``options`` are read as the fields of the same meaning; those about how
a model is loaded (``num_gpu``, ``num_thread``, ...) and unknown ones are ignored, with a line in the log the first
time, and ``num_ctx`` is at most the server's. What is left out has the server's default, not Ollama's. ``keep_alive``
is ignored: the served model always stays. ``/api/pull`` tells that a served model is there; the routes that change
models are refused with a sentence, for models are the operator's.

A body may have any content type, or none, unless a web page sent it.
"""

from fwk import DialectSpec, hookimpl


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="ollama",
            load="fwk_server.ollama.dialect:OllamaDialect",
            summary="Ollama's HTTP API: chat, generate, embed, tags, show, ps, pull, version",
        )
    ]
