"""Models on the Hugging Face Hub, or one that speaks its protocol (``HF_ENDPOINT``)."""

from fwk import ModelSourceSpec, hookimpl


@hookimpl
def model_sources() -> list[ModelSourceSpec]:
    """Declare the source."""
    return [
        ModelSourceSpec(
            name="hub",
            load="fwk_loaders.hub.source:HubSource",
            rank=10,
            summary="ORGANISATION/NAME on the Hugging Face Hub; ORGANISATION/NAME:TAG for one GGUF file, as :Q4_K_M",
        )
    ]
