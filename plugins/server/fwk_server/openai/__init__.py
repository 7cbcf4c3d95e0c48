"""The OpenAI HTTP dialect: chat completions, completions, models, and vLLM's tokenize and detokenize.

Fields nobody here reads are ignored, as OpenAI's own clients expect of a server: ``user``, ``metadata``, ``store``,
``service_tier``, ``safety_identifier``, ``prompt_cache_*``, ``prediction`` and ``verbosity`` (hints),
``parallel_tool_calls``, ``session_id``, and anything unknown. A field that asks for something this server cannot do
(``suffix``, structured output, tools without a parser, audio, ...) is refused with 400 and its name in ``param``:
ignoring it would lie. The table of those is in ``refusals.py``.

Two values leave OpenAI's published schema, where OpenAI's service leaves it too and clients rely on it: a completion's
``finish_reason`` is null in the chunks before its last, and the first token of an echoed prompt, which nothing
predicts, has a null log-probability.
"""

from fwk import DialectSpec, hookimpl


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="openai",
            load="fwk_server.openai.dialect:OpenAIDialect",
            summary="OpenAI's HTTP API: chat completions, completions, models, tokenize, detokenize",
        )
    ]
