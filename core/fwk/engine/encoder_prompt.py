"""Where the K/V of a model with an encoder are: its cross-attention reads those at the prompt's places."""

from __future__ import annotations

import msgspec

from fwk.interfaces.model import EncoderInput
from fwk.types import Request


def placed(request: Request, encoder: EncoderInput, block_size: int) -> Request:
    """The request with the decoder's first tokens behind the prompt, from a block's first place on.

    So the K/V of a layer's cross-attention and those of its self-attention are in blocks of their own, in one table:
    the first are written once and the others grow. Nothing is computed for the places between a prompt's end and that
    of its last block; the prompt's last token is there, so that what counts tokens finds no other.
    """
    prompt, rest = request.prompt_token_ids[: encoder.num_tokens], list[int]()
    if encoder.num_tokens is not None:
        rest = request.prompt_token_ids[encoder.num_tokens :]
    tokens = [*prompt, *prompt[-1:] * (-len(prompt) % block_size), *rest, *encoder.start]
    return msgspec.structs.replace(request, prompt_token_ids=tokens, num_encoder_tokens=len(prompt))
