"""Hugging Face's Text Generation Inference API: /generate, /generate_stream, / (either, by ``stream``) and /info.

What follows TGI where it differs from OpenAI's dialect: sampling is off unless a request asks for it, the model's own
sampling defaults are not applied, 100 tokens are generated unless the request says otherwise (``null``: as many as
there is room for), stop strings stay in the text, special tokens are in the token list, and a stream has one event per
token. ``best_of`` runs that many sequences and answers with the one of the highest mean log-probability.

SGLang's own API is on the same path: a body of ``/generate`` with ``text`` or ``input_ids`` and ``sampling_params`` is
read and answered as SGLang does (``text`` and ``meta_info``, whole texts in a stream, 128 tokens by default), with the
server's own sampling defaults.

``grammar`` is a JSON schema or a regular expression. ``typical_p`` and ``watermark`` are logits processors. Refused:
``adapter_id``, and parameters that other servers' APIs have. /tokenize is the OpenAI dialect's. Paths of LightLLM,
SGLang, vLLM and RTP-LLM that this server has under another name are answered with it (``elsewhere.py``).
"""

from typing import Literal

from fwk import DialectSpec, Options, hookimpl, option


class TGIOptions(Options):
    """Options of ``dialects.tgi``."""

    generate_api: Literal["tgi", "lightllm"] = option(
        "tgi", "Whose parameters and replies /generate and /generate_stream have where a body has inputs."
    )
    weight_version: str = option(
        "default", "Name of the weights' version, which SGLang's /generate replies with.", min_length=1, max_length=256
    )
    stream_output: bool = option(
        False, "Events of SGLang's /generate have only the text and tokens that are new, not all so far."
    )


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="tgi",
            options=TGIOptions,
            load="fwk_server.tgi.dialect:TGIDialect",
            summary="Text Generation Inference's HTTP API: generate (SGLang's too), generate_stream, info",
        )
    ]
