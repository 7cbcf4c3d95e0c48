"""Files of sound for models that transcribe: decoded in a process of their own, to samples that dialects cut up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.errors import ConfigError
from fwk.interfaces.declaration import Facts
from fwk.interfaces.feature import FeatureRun


class TranscriptionOptions(Options):
    """Options of ``features.transcription``."""

    max_sound_seconds: int = option(
        7200,
        "Seconds of the longest sound that is transcribed; longer ones are refused (400).",
        stability="beta",
        ge=1,
        le=86_400,
    )


def transcribes(config: Mapping[str, Any]) -> bool:
    """Whether a model, by its config.json, has a decoder that writes down what an encoder hears."""
    return bool(config.get("is_encoder_decoder")) and "num_mel_bins" in config


class TranscriptionSpec(FeatureSpec):
    """Takes part where the model has a decoder that writes down what an encoder hears."""

    def refusal(self, facts: Facts) -> str | None:
        if facts.model is not None and not transcribes(facts.model.raw):
            return f"is for models that transcribe sounds, which {facts.architecture} does not"
        return super().refusal(facts)

    def check_run(self, run: FeatureRun, options: Any) -> None:
        if "audio" not in run.media:
            raise ConfigError(f"{run.model} transcribes sounds and does nothing else: leave --enable-multimodal on")


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        TranscriptionSpec(
            name="transcription",
            server="fwk_multimodal.transcription.server:Transcription",
            job="fwk_multimodal.transcription.server:SoundJobs",
            options=TranscriptionOptions,
            server_options=("max_sound_seconds",),
            changes_kv=False,
            summary="files of sound for models that transcribe them",
        )
    ]
