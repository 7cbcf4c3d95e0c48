"""How steps are planned: how many prompts share one, what they may cost sequences that decode, what these keep free."""

from __future__ import annotations

from dataclasses import dataclass

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.interfaces.feature import StepPlanning


class StepPlanningOptions(Options):
    """Options of ``features.step_planning``."""

    max_start_tokens: int | None = option(
        None,
        "Tokens of prompts in a step from which it starts no further prompt, so that the first of several are answered "
        "sooner; four times as many of requests for one token (default: no limit; on a CPU 16, since computing more of "
        "them together is hardly cheaper there).",
        ge=1,
        le=2**20,
    )
    max_decode_gap: float | None = option(
        None,
        "While sequences decode, prompts are cut so that one alone makes a step take at most so many times one "
        "without; each further one that waits adds as much; 0: no bound (default: none; on a CPU 2.5).",
        ge=0,
        le=1000,
    )
    prefill_max_requests: int | None = option(
        None,
        "Prompts computed in one step, from which it starts no further one (default: no limit).",
        aliases=["max-context-batch-size"],
        turns={"prefill-only-one-req": 1},
        ge=1,
        le=4096,
    )
    enable_mixed_chunk: bool = option(
        StepPlanning().is_mixed,
        "Compute prompts and next tokens in the same step; false: steps of the one and of the other take turns.",
    )
    schedule_conservativeness: float = option(
        StepPlanning().conservativeness,
        "Blocks of KV cache kept free for each running sequence when another one starts: more means fewer "
        "pre-emptions, less means more sequences at once.",
        ge=0,
        le=2**20,
    )
    num_continuous_decode_steps: int = option(
        StepPlanning().admission_interval,
        "Steps from one look at the waiting queue to the next, while sequences run: more means less scheduling, and "
        "a longer wait for the first token.",
        aliases=["router-max-wait-tokens"],
        ge=1,
        le=1024,
    )


@dataclass(frozen=True, kw_only=True)
class StepPlanningSpec(FeatureSpec):
    """Has no parts: the scheduler goes by what its options say, and by a ``Pace``."""

    def step_planning(self, options: StepPlanningOptions) -> StepPlanning:
        from fwk_features.step_planning.pace import Pace  # noqa: PLC0415 - where steps are planned

        return StepPlanning(
            max_start_tokens=options.max_start_tokens,
            max_decode_gap=options.max_decode_gap,
            pace=Pace,
            max_prompts=options.prefill_max_requests,
            is_mixed=options.enable_mixed_chunk,
            conservativeness=options.schedule_conservativeness,
            admission_interval=options.num_continuous_decode_steps,
        )


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        StepPlanningSpec(
            name="step_planning",
            load="fwk_features.step_planning:StepPlanningSpec",
            options=StepPlanningOptions,
            runners=("generate", "pool"),
            changes_kv=False,
            summary="how many prompts share a step, what they may cost those that decode, and what is kept for them",
        )
    ]
