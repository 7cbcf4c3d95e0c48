"""Shortest job first, with ageing: what is quick to serve goes first, and nobody is overtaken for ever."""

from __future__ import annotations

from fwk import Options, SchedulePolicySpec, hookimpl, option


class SjfOptions(Options):
    """Options of ``schedulers.sjf``."""

    sjf_aging: float = option(
        100.0,
        "Tokens a second of waiting is worth: a request is overtaken only by those that arrive until its extra "
        "length has been waited off; 0: by any shorter one, for ever.",
        ge=0,
        le=1e9,
    )


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="sjf",
            load="fwk_schedulers.sjf.policy:ShortestJobFirst",
            options=SjfOptions,
            summary="Requests with the fewest tokens, prompt and max_tokens, start first; waiting counts in favour.",
        )
    ]
