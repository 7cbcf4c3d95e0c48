"""A limit on thinking: when it is used up, a message and the closing mark are written in the model's place.

Qwen3's report (2505.09388, section 4.3) describes the method: the model continues from a sentence that says its time is
up. The fields are vLLM's and llama.cpp's. The server adds the marks of the model's thinking, from the reasoning parser.
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from fwk import LogitsProcessorSpec, hookimpl


class ThinkingBudgetParams(BaseModel):
    """``thinking_token_budget`` of vLLM, ``reasoning_budget_message`` of llama.cpp."""

    thinking_token_budget: int = Field(
        -1,
        ge=-1,
        le=2**31 - 1,
        description="Tokens the model may think for, then its thinking is closed; -1: no limit.",
    )
    reasoning_budget_message: str | None = Field(
        None, max_length=4_096, description="What the thinking ends with when its budget is used up."
    )


@hookimpl
def logits_processors() -> list[LogitsProcessorSpec]:
    return [
        LogitsProcessorSpec(
            name="thinking_budget",
            load="fwk_sampling.thinking_budget.processor:ThinkingBudget",
            order=290,
            params=ThinkingBudgetParams,
            summary="Closes the thinking with a message when its budget is used up (Qwen3).",
        )
    ]
