"""Speculation with a smaller model of the same vocabulary."""

from __future__ import annotations

from fwk import SpeculativeDecoderSpec, hookimpl, option
from fwk_speculative._common import DraftOptions


class StandaloneOptions(DraftOptions):
    """Options of the ``standalone`` decoder."""

    speculative_draft_model_path: str | None = option(
        None,
        "Model that drafts: a folder, a .gguf file, a hub id, or a name a model source knows.",
        aliases=["speculative-draft-model"],
        stability="beta",
    )


@hookimpl
def speculative_decoders() -> list[SpeculativeDecoderSpec]:
    return [
        SpeculativeDecoderSpec(
            name="standalone",
            load="fwk_speculative.standalone.decoder:StandaloneDecoder",
            options=StandaloneOptions,
            summary="Drafts with a second, smaller model.",
        )
    ]
