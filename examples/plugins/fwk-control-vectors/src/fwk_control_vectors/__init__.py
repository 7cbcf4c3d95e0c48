"""Control vectors: directions that are added to the residual stream of chosen layers, for the requests that ask."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel, Field

from fwk import FeatureSpec, Limit, Options, hookimpl, option
from fwk.interfaces.feature import Wire


class ControlVectorOptions(Options):
    """Options of ``features.control_vectors``."""

    enable_control_vectors: bool = option(
        False, "Let requests ask for control vectors, which the administrator loads.", stability="beta"
    )
    control_vector_max_bytes: int = option(
        2**26, "Bytes of a file of control vectors at most.", stability="beta", ge=1, le=2**32
    )


class ControlVectorFields(BaseModel):
    """What a request may say."""

    control_vector: str = Field("", max_length=128, description="A loaded control vector.")
    control_strength: float = Field(1.0, ge=-100.0, le=100.0, description="What it is multiplied by.")


class Steering(msgspec.Struct, frozen=True):
    """What the server sends on to the workers with a request: a vector by its key, and how strong it is."""

    key: str
    strength: float


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="control_vectors",
            server="fwk_control_vectors.server:ControlVectorRoutes",
            worker="fwk_control_vectors.worker:ControlVectors",
            wire=Wire(request=Steering, sequence=Steering),
            params=ControlVectorFields,
            options=ControlVectorOptions,
            enabled_by=("enable_control_vectors",),
            limits=(Limit("task", ("generate",), "vectors are added where text is generated"),),
            summary="control vectors, loaded at POST /control_vectors",
        )
    ]
