"""Hugging Face's Text Generation Inference API: /generate, /generate_stream, / (either, by ``stream``) and /info.

What follows TGI where it differs from OpenAI's dialect: sampling is off unless a request asks for it, the model's own
sampling defaults are not applied, 100 tokens are generated unless the request says otherwise (``null``: as many as
there is room for), stop strings stay in the text, special tokens are in the token list, and a stream has one event per
token. ``best_of`` runs that many sequences and answers with the one of the highest mean log-probability.

``typical_p`` and ``watermark`` are logits processors. Refused: ``grammar`` and ``adapter_id``. /tokenize is the OpenAI
dialect's.
"""

from fwk import DialectSpec, hookimpl


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="tgi",
            load="fwk_server.tgi.dialect:TGIDialect",
            summary="Text Generation Inference's HTTP API: generate, generate_stream, info",
        )
    ]
