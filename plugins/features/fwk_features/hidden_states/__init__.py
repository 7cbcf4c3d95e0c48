"""Hidden states in replies: what logits are made of, of every token of the prompt and of the output but its last."""

from __future__ import annotations

import msgspec

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.interfaces.declaration import Facts
from fwk.interfaces.feature import Wire


class HiddenStatesOptions(Options):
    """Options of ``features.hidden_states``."""

    enable_return_hidden_states: bool = option(
        False,
        "Let requests ask for hidden states (return_hidden_states): of each token what its logits are made of.",
        stability="beta",
    )


class Wanted(msgspec.Struct, frozen=True):
    """What goes along with such a request, to the engine and to the workers: that it asks."""


class StepStates(msgspec.Struct, array_like=True, frozen=True):
    """Of a sequence's tokens in a step, from the token at ``start`` on: float32 numbers of each, little-endian.

    Those of drafts are among them, whatever becomes of these.
    """

    start: int
    rows: list[bytes]


class NewStates(msgspec.Struct, array_like=True, frozen=True):
    """Of each token that was computed since the last piece of the reply, the prompt's with the first one."""

    rows: list[bytes]


class HiddenStatesSpec(FeatureSpec):
    """Refuses models whose tokens have no such states, and drafts whose places in the text are not their order."""

    def refusal(self, facts: Facts) -> str | None:
        leave = "leave --enable-return-hidden-states out"
        if facts.drafts == "tree":
            names = " ".join(facts.chosen.get("speculative", ()))
            return (
                "takes no trees: hidden states are returned of chains of drafts, and --speculative-algorithm "
                f"{names} verifies trees; {leave}, or that"
            )
        if facts.task not in ("", "generate"):
            return (
                f"is for text: the model is served to {facts.task}, and its replies are made of hidden states "
                f"(/v1/embeddings, /pooling); {leave}"
            )
        if facts.model is not None and facts.model.raw.get("is_encoder_decoder"):
            return f"is for models with an encoder or a decoder: this one has both; {leave}"
        return super().refusal(facts)


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        HiddenStatesSpec(
            name="hidden_states",
            server="fwk_features.hidden_states.server:HiddenStatesServer",
            engine="fwk_features.hidden_states.engine:HiddenStatesEngine",
            worker="fwk_features.hidden_states.worker:HiddenStatesWorker",
            wire=Wire(request=Wanted, sequence=Wanted, result=StepStates, event=NewStates),
            fields=("return_hidden_states",),
            changes_kv=False,
            options=HiddenStatesOptions,
            enabled_by=("enable_return_hidden_states",),
            summary="hidden states in replies (return_hidden_states)",
        )
    ]
