"""llama.cpp's own HTTP API: ``/completion``, ``/completions``, ``/infill``, ``/apply-template`` and ``/props``.

``n_predict`` left out or -1 continues until the model ends or the context is full. ``input_extra`` of ``/infill`` is
other files of the project, for models that were trained with such. Samplers and penalties mean what they mean in
``/v1/completions``; what cannot be done is refused by name. /tokenize and /detokenize are the OpenAI dialect's, which
reads llama.cpp's ``content`` too.
"""

from fwk import DialectSpec, hookimpl


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="llamacpp",
            load="fwk_server.llamacpp.dialect:LlamaCppDialect",
            summary="llama.cpp's HTTP API: completion, infill, apply-template, props",
        )
    ]
