"""How undecided the model was, of requests that ask, at GET /mine/entropy."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel, ConfigDict

from fwk import FeatureSpec, Limit, hookimpl
from fwk.interfaces.feature import Wire


class MineFields(BaseModel):
    """What a request may say."""

    model_config = ConfigDict(strict=True)

    mine_entropy: bool = False


class MineRequest(msgspec.Struct, frozen=True):
    """What goes along with such a request, from the server to the engine and on to the workers: that it asks."""


class MineResult(msgspec.Struct, frozen=True):
    """What comes back with a step: the sum of the entropies of its choices, in nats, and how many there were."""

    total: float
    count: int


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="mine",
            server="fwk_mine.plugin:MineServer",
            engine="fwk_mine.plugin:MineEngine",
            worker="fwk_mine.plugin:MineWorker",
            wire=Wire(request=MineRequest, sequence=MineRequest, result=MineResult, event=MineResult),
            params=MineFields,
            limits=(Limit("task", ("generate",), "it looks at the choices of next tokens"),),
            summary="how undecided the model was, at GET /mine/entropy",
        )
    ]
