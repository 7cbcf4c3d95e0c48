"""Log-probabilities of a prompt's tokens in replies, and of the most likely ones in their places."""

from __future__ import annotations

import msgspec

from fwk import FeatureSpec, hookimpl
from fwk.interfaces.declaration import Facts
from fwk.interfaces.feature import Wire


class Scored(msgspec.Struct, frozen=True):
    """What goes along with such a request, to the engine and to the workers.

    num_top: most likely tokens that are reported in each place.
    """

    num_top: int


class StepScores(msgspec.Struct, array_like=True, frozen=True):
    """Of the prompt's next ``count`` tokens, from the second one on: ``list[TokenLogprobs]``, for the server."""

    count: int
    entries: msgspec.Raw


class PromptScores(msgspec.Struct, array_like=True, frozen=True):
    """With the first tokens of the reply: the entries of all steps of the prompt, one after another."""

    entries: list[msgspec.Raw]


class PromptLogprobsSpec(FeatureSpec):
    """Has no part in models that generate nothing: no request of theirs can ask."""

    def is_meant_for(self, facts: Facts) -> bool:
        return facts.task in ("", "generate")


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        PromptLogprobsSpec(
            name="prompt_logprobs",
            server="fwk_features.prompt_logprobs.server:PromptLogprobsServer",
            engine="fwk_features.prompt_logprobs.engine:PromptLogprobsEngine",
            worker="fwk_features.prompt_logprobs.worker:PromptLogprobsWorker",
            wire=Wire(request=Scored, sequence=Scored, result=StepScores, event=PromptScores),
            fields=("prompt_logprobs",),
            changes_kv=False,
            summary="log-probabilities of prompts (prompt_logprobs, echo)",
        )
    ]
