"""What Whisper's decoding rules out (Radford et al. 2022, arXiv:2212.04356, 4.5): tokens, and times out of turn."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from fwk import LogitsProcessorSpec, hookimpl

_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=4_096)]


class SuppressParams(BaseModel):
    """Of transformers' ``generation_config.json``."""

    suppress_tokens: _Ids = Field([], description="Token ids that are never chosen.")
    begin_suppress_tokens: _Ids = Field([], description="Token ids that are not chosen first.")


class TimestampParams(BaseModel):
    """Whisper's timestamp tokens, in order of time, are all ids from one on."""

    timestamp_begin: int = Field(
        -1,
        ge=-1,
        lt=2**31,
        description="The first timestamp token: they come in pairs, in order, and where they are likelier than any "
        "other token. -1: off.",
    )
    max_initial_timestamp_index: int = Field(
        -1, ge=-1, lt=2**31, description="How many timestamps behind the first one the text may begin with. -1: any."
    )


@hookimpl
def logits_processors() -> list[LogitsProcessorSpec]:
    return [
        LogitsProcessorSpec(
            name="suppress_tokens",
            load="fwk_sampling.whisper.processors:SuppressTokens",
            order=140,
            params=SuppressParams,
            summary="Forbids suppress_tokens, and begin_suppress_tokens at the beginning.",
        ),
        LogitsProcessorSpec(
            name="timestamps",
            load="fwk_sampling.whisper.processors:Timestamps",
            order=150,
            params=TimestampParams,
            summary="Whisper's rules of timestamps: in pairs, in order, and by their probability together.",
        ),
    ]
