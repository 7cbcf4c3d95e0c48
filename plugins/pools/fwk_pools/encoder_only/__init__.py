"""No engine at all: a server that only encodes what other servers' prompts bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fwk import EnginePoolSpec, Options, hookimpl, option


class EncoderOnlyOptions(Options):
    """Options of ``engine_pools.encoder_only``."""

    encoder_only: bool = option(
        False,
        "Encode images and the like for servers that name this one in --encoder-servers, and nothing else: no engine "
        "is started.",
        stability="experimental",
    )


@dataclass(frozen=True, kw_only=True)
class EncoderOnlySpec(EnginePoolSpec):
    """Made of no pool."""

    def num_pools(self, options: Any) -> int:
        return 0


@hookimpl
def engine_pools() -> list[EnginePoolSpec]:
    return [
        EncoderOnlySpec(
            name="encoder_only",
            load="fwk_pools.encoder_only.pool:NoEngines",
            options=EncoderOnlyOptions,
            enabled_by=("encoder_only",),
            summary="no engine, in a server that encodes for others",
        )
    ]
