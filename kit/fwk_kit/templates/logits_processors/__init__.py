"""A bias for tokens the text has already."""

from __future__ import annotations

from pydantic import BaseModel, Field

from fwk import LogitsProcessorSpec, hookimpl


class MineParams(BaseModel):
    """Fields of a request that the processor reads."""

    mine_echo: float = Field(0.0, ge=-100, le=100, description="Added to the logits of tokens the text has already.")


@hookimpl
def logits_processors() -> list[LogitsProcessorSpec]:
    return [
        LogitsProcessorSpec(
            name="mine",
            load="fwk_mine.plugin:MineProcessor",
            order=200,
            params=MineParams,
            summary="a bias for tokens the text has already",
        )
    ]
