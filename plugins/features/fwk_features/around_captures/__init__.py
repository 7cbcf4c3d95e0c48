"""What is done around capturing a device's steps: Python's garbage collector held, and a profile taken."""

from __future__ import annotations

from dataclasses import dataclass

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.errors import ConfigError
from fwk.interfaces.feature import FeatureRun


class CapturesOptions(Options):
    """Options of ``features.around_captures``."""

    enable_cudagraph_gc: bool = option(
        False,
        "Let Python's garbage collector run while steps are captured on a GPU; otherwise it is off, or kept from the "
        "objects that were there before, and capturing is faster.",
        stability="beta",
    )
    enable_profile_cuda_graph: bool = option(
        False,
        "Log which operators took the most time while steps were captured on a GPU.",
        stability="beta",
    )

    def given(self) -> list[str]:
        """The flags that were set."""
        return [f"--{name.replace('_', '-')}" for name in type(self).model_fields if getattr(self, name)]


@dataclass(frozen=True, kw_only=True)
class CapturesSpec(FeatureSpec):
    """Refuses what would do nothing."""

    def check_run(self, run: FeatureRun, options: CapturesOptions) -> None:
        for name in options.given() if run.config.engine.disable_cuda_graph else ():
            raise ConfigError(f"{name} and --disable-cuda-graph: nothing is captured, so leave one of them out")


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        CapturesSpec(
            name="around_captures",
            worker="fwk_features.around_captures.worker:AroundCaptures",
            options=CapturesOptions,
            runners=("generate", "pool"),
            changes_kv=False,
            summary="Python's garbage collector held while steps are captured on a GPU, a profile taken if asked",
        )
    ]
