"""The standard request fields that edit logits: masks and bias, penalties, temperature, truncation.

Each is stateless beyond its settings per slot: what it needs of the text it reads from the ``LogitsView``, so drafts,
rejected drafts and pre-emption need no care. One that leaves a row without any token to pick blames its sequence.
"""

from __future__ import annotations

from fwk import LogitsProcessorSpec, hookimpl


@hookimpl
def logits_processors() -> list[LogitsProcessorSpec]:
    return [
        LogitsProcessorSpec(
            name="logit_bias",
            load="fwk_sampling.processors.masks:LogitBias",
            order=100,
            summary="Adds logit_bias to the logits.",
        ),
        LogitsProcessorSpec(
            name="min_tokens",
            load="fwk_sampling.processors.masks:MinTokens",
            order=110,
            summary="Forbids end and stop tokens until min_tokens have been generated.",
        ),
        LogitsProcessorSpec(
            name="bad_words",
            load="fwk_sampling.processors.bad_words:BadWords",
            order=120,
            summary="Forbids the token that would complete one of bad_words.",
        ),
        LogitsProcessorSpec(
            name="allowed_token_ids",
            load="fwk_sampling.processors.masks:AllowedTokenIds",
            order=130,
            summary="Forbids every token that is not in allowed_token_ids.",
        ),
        LogitsProcessorSpec(
            name="penalties",
            load="fwk_sampling.processors.penalties:Penalties",
            order=200,
            summary="Applies repetition_penalty, frequency_penalty and presence_penalty.",
        ),
        LogitsProcessorSpec(
            name="temperature",
            load="fwk_sampling.processors.temperature:Temperature",
            order=300,
            summary="Divides the logits by temperature.",
        ),
        LogitsProcessorSpec(
            name="truncation",
            load="fwk_sampling.processors.truncation:Truncation",
            order=400,
            summary="Keeps the tokens that top_k, top_p and min_p leave.",
        ),
    ]
