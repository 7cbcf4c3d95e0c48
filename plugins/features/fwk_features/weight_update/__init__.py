"""Another checkpoint's weights in a running server: read and checked alongside those that serve, then exchanged."""

from __future__ import annotations

from fwk import FeatureSpec, Limit, hookimpl


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="weight_update",
            server="fwk_features.weight_update.server:WeightUpdates",
            engine="fwk_features.weight_update.engine:EngineWeights",
            worker="fwk_features.weight_update.worker:WorkerWeights",
            methods=("update_weights",),
            exclusive=("update_weights",),
            runners=("generate", "pool"),
            changes_kv=False,
            limits=(Limit("pp_size", (1,), "each stage would read its own weights, and one may refuse them alone"),),
            summary="the weights of another checkpoint while the server runs (POST /update_weights_from_disk)",
        )
    ]
