"""Samplers that single servers made popular: typical-p, top-n-sigma, top-a, XTC, DRY, dynamic temperature, watermark,
mirostat.

All edit logits before temperature and top-k, top-p and min-p, in the order of llama.cpp's default chain: watermark,
DRY, dynamic temperature, top-n-sigma, typical-p, top-a, XTC, mirostat. Truncating ones leave greedy requests alone, as
the most probable token stays either way; XTC would remove it, and leaves them alone too.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from fwk import LogitsProcessorSpec, hookimpl


class TypicalParams(BaseModel):
    """``typical_p`` of transformers, TGI and llama.cpp."""

    typical_p: float = Field(
        1.0, gt=0, le=1, description="Keeps the tokens of most typical information up to this mass; 1 is off."
    )


class TopNSigmaParams(BaseModel):
    """``top_n_sigma`` of llama.cpp."""

    top_n_sigma: float = Field(
        -1.0, ge=-1, le=100, description="Keeps logits within this many deviations of the largest; 0 or less is off."
    )


class TopAParams(BaseModel):
    """``top_a`` of KoboldAI."""

    top_a: float = Field(
        0.0, ge=0, le=1, description="Keeps tokens of at least top_a times the square of the largest probability."
    )


class XtcParams(BaseModel):
    """``xtc_*`` of llama.cpp and text-generation-webui."""

    xtc_probability: float = Field(0.0, ge=0, le=1, description="Chance that XTC acts at a token; 0 is off.")
    xtc_threshold: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Of the tokens at least this probable XTC keeps the least probable; above 0.5: off.",
    )


class DryParams(BaseModel):
    """``dry_*`` of llama.cpp and text-generation-webui."""

    dry_multiplier: float = Field(0.0, ge=0, le=100, description="Strength of DRY; 0 is off.")
    dry_base: float = Field(1.75, ge=1, le=10, description="Growth of DRY's penalty with each repeated token.")
    dry_allowed_length: int = Field(2, ge=1, le=1_024, description="Repeated tokens up to which DRY does not penalise.")
    dry_penalty_last_n: int = Field(
        -1, ge=-1, le=2**31 - 1, description="Tokens DRY looks back at; -1 is the whole text, 0 is off."
    )
    dry_sequence_breakers: list[Annotated[str, Field(max_length=64)]] = Field(
        ["\n", ":", '"', "*"], max_length=64, description="Texts that no repetition DRY penalises goes across."
    )


class DynamicTemperatureParams(BaseModel):
    """``dynatemp_*`` of llama.cpp."""

    dynatemp_range: float = Field(
        0.0, ge=0, le=100, description="The temperature goes from temperature - range to + range with the entropy."
    )
    dynatemp_exponent: float = Field(1.0, gt=0, le=100, description="Exponent of the entropy's share.")


class MirostatParams(BaseModel):
    """``mirostat*`` of llama.cpp and Ollama."""

    mirostat: int = Field(0, ge=0, le=2, description="Version of mirostat; 0 is off.")
    mirostat_tau: float = Field(5.0, gt=0, le=100, description="Surprise in bits that mirostat steers to.")
    mirostat_eta: float = Field(0.1, ge=0, le=1, description="How fast mirostat follows.")


class WatermarkParams(BaseModel):
    """``watermark`` of TGI."""

    watermark: bool = Field(False, description="Favours a set of tokens that the token before chooses.")
    watermark_gamma: float = Field(0.5, gt=0, lt=1, description="Share of the vocabulary that is favoured.")
    watermark_delta: float = Field(2.0, ge=0, le=100, description="Added to the logits of favoured tokens.")


@hookimpl
def logits_processors() -> list[LogitsProcessorSpec]:
    return [
        LogitsProcessorSpec(
            name="watermark",
            load="fwk_sampling.zoo.watermark:Watermark",
            order=205,
            params=WatermarkParams,
            summary="Favours a set of tokens chosen by the token before (Kirchenbauer et al. 2023).",
        ),
        LogitsProcessorSpec(
            name="dry",
            load="fwk_sampling.zoo.dry:Dry",
            order=210,
            params=DryParams,
            summary="Penalises the token that would prolong a repetition.",
        ),
        LogitsProcessorSpec(
            name="dynamic_temperature",
            load="fwk_sampling.zoo.dynamic_temperature:DynamicTemperature",
            order=220,
            params=DynamicTemperatureParams,
            summary="A temperature that grows with the entropy of the distribution.",
        ),
        LogitsProcessorSpec(
            name="top_n_sigma",
            load="fwk_sampling.zoo.truncations:TopNSigma",
            order=250,
            params=TopNSigmaParams,
            summary="Keeps logits within n standard deviations of the largest (Tang et al. 2024).",
        ),
        LogitsProcessorSpec(
            name="typical",
            load="fwk_sampling.zoo.truncations:Typical",
            order=260,
            params=TypicalParams,
            summary="Keeps the tokens of most typical information (Meister et al. 2023).",
        ),
        LogitsProcessorSpec(
            name="top_a",
            load="fwk_sampling.zoo.truncations:TopA",
            order=270,
            params=TopAParams,
            summary="Keeps tokens of at least top_a times the square of the largest probability.",
        ),
        LogitsProcessorSpec(
            name="xtc",
            load="fwk_sampling.zoo.xtc:Xtc",
            order=280,
            params=XtcParams,
            summary="Now and then excludes all probable tokens but the least probable of them.",
        ),
        LogitsProcessorSpec(
            name="mirostat",
            load="fwk_sampling.zoo.mirostat:Mirostat",
            order=290,
            params=MirostatParams,
            summary="Steers truncation to a surprise asked for (Basu et al. 2021), versions 1 and 2.",
        ),
    ]
