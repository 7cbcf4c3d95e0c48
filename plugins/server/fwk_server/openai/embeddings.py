"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, Frontend
from fwk_server._common.body import validate
from fwk_server._common.caller import Caller
from fwk_server._common.chat.models import MAX_INPUTS, EmbeddingRequest
from fwk_server._common.chat.other_names import refuse_unsupported
from fwk_server._common.chat.served import check_model
from fwk_server._common.dimensions import check_dimensions, cut
from fwk_server._common.inputs import read_prompts


@dataclass(slots=True)
class EmbeddingCall:
    """An embeddings request, ready to run."""

    body: EmbeddingRequest
    items: list[EmbedInput]


def prepare(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> EmbeddingCall:
    """Read and tokenise. Runs off the event loop when there is much of it."""
    body = validate(EmbeddingRequest, raw)
    check_model(body.model, frontend.card)
    frontend.card.check_task("embed")
    refuse_unsupported(raw)
    if frontend.card.has_token_vectors:
        raise InvalidRequest(f"the model {frontend.card.name!r} makes a vector of each token: use /pooling")
    check_dimensions(body.dimensions, frontend.card)
    prompts = read_prompts(body.input, body.add_special_tokens is not False, frontend, "input", MAX_INPUTS)
    for i, prompt in enumerate(prompts):
        if prompt.text == "":
            raise InvalidRequest("input must not be an empty string", _at(i, prompts))
    urgency, service = body.urgency(caller), body.service(caller)
    items = [EmbedInput(prompt.token_ids, urgency, caller.label, caller.trace, service) for prompt in prompts]
    return EmbeddingCall(body, items)


def check(call: EmbeddingCall, frontend: Frontend) -> None:
    """Have the frontend check every input."""
    for i, item in enumerate(call.items):
        try:
            call.items[i] = frontend.check_embed(item)
        except InvalidRequest as error:
            param = _at(i, call.items) if error.param == "input" else error.param
            message = str(error)
            raise InvalidRequest(f"{param}: {message}" if len(call.items) > 1 else message, param) from None


def _at(i: int, inputs: Sequence[Any]) -> str:
    return "input" if len(inputs) == 1 else f"input[{i}]"


async def embed(call: EmbeddingCall, frontend: Frontend) -> dict[str, Any]:
    """The reply: embeddings in the order of the inputs."""
    write = _base64 if call.body.encoding_format == "base64" else _floats
    vectors = [cut(vector, call.body.dimensions) for vector in await frontend.embed(call.items)]
    num_tokens = sum(len(item.token_ids) for item in call.items)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": write(vector)} for i, vector in enumerate(vectors)],
        "model": call.body.model or frontend.card.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
