"""Steps with prompts replayed in pieces on a device: what is between two layers' attention is captured."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import model_validator

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.errors import ConfigError
from fwk.interfaces.feature import FeatureRun

ENABLE, LISTED, LIMIT = (
    "--enable-piecewise-cuda-graph",
    "--piecewise-cuda-graph-tokens",
    "--piecewise-cuda-graph-max-tokens",
)
MAX_TOKENS = 4096


class PiecesOptions(Options):
    """Options of ``features.piecewise_graphs``."""

    enable_piecewise_cuda_graph: bool = option(
        False,
        "On a GPU, replay steps with prompts, too, in pieces: what is between two layers' attention is captured for "
        "some numbers of tokens, attention is computed. On a CPU one capture serves prompts as it is.",
        stability="beta",
    )
    piecewise_cuda_graph_tokens: tuple[int, ...] = option(
        (),
        "Numbers of tokens for which steps are captured in pieces (default: multiples of 16, from 256 on of 64, from "
        "1024 on of 256); others are padded to the next.",
        stability="beta",
    )
    piecewise_cuda_graph_max_tokens: int = option(
        MAX_TOKENS,
        "Most tokens of a step that is replayed in pieces; larger steps are computed operator by operator.",
        stability="beta",
        ge=1,
        le=2**20,
    )

    @model_validator(mode="after")
    def _is_on(self) -> PiecesOptions:
        """Refuse what would do nothing."""
        given = {
            LISTED: self.piecewise_cuda_graph_tokens,
            LIMIT: self.piecewise_cuda_graph_max_tokens != MAX_TOKENS,
        }
        for name in (name for name, value in given.items() if value and not self.enable_piecewise_cuda_graph):
            raise ValueError(f"{name}: nothing is captured in pieces; add {ENABLE} or leave it out")
        return self

    def most(self, step_tokens: int) -> int:
        """Tokens of the largest step that is captured. step_tokens: that a step computes at most."""
        return min(self.piecewise_cuda_graph_max_tokens, step_tokens)

    def sizes(self, step_tokens: int) -> tuple[int, ...]:
        """Numbers of tokens that are captured, smallest first."""
        most = self.most(step_tokens)
        spread = {*range(16, 256, 16), *range(256, 1024, 64), *range(1024, most, 256), most}
        return tuple(sorted(set(self.piecewise_cuda_graph_tokens or (size for size in spread if size <= most))))


@dataclass(frozen=True, kw_only=True)
class PiecesSpec(FeatureSpec):
    """Refuses sizes of no step."""

    def check_run(self, run: FeatureRun, options: PiecesOptions) -> None:
        if run.config.engine.disable_cuda_graph:
            raise ConfigError(f"{ENABLE} and --disable-cuda-graph: nothing is captured, so leave one of them out")
        most = options.most(run.step_tokens)
        for size in options.piecewise_cuda_graph_tokens:
            if size < 1:
                raise ConfigError(f"{LISTED} {size}: a step has at least 1 token")
            if size > most:
                limit = options.piecewise_cuda_graph_max_tokens
                why = f"{LIMIT} {most}" if most == limit else f"the {most} tokens of a step"
                raise ConfigError(f"{LISTED} {size} is more than {why}: no captured step is as large")


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        PiecesSpec(
            name="piecewise_graphs",
            worker="fwk_features.piecewise_graphs.worker:PromptGraphs",
            options=PiecesOptions,
            enabled_by=("enable_piecewise_cuda_graph",),
            summary="steps with prompts replayed in pieces between calls of attention, on a GPU",
        )
    ]
