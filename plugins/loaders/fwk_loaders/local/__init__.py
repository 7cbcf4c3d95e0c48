"""Models that are already on this machine: a folder or a file."""

from fwk import ModelSourceSpec, hookimpl


@hookimpl
def model_sources() -> list[ModelSourceSpec]:
    """Declare the source; it is asked before all others."""
    return [
        ModelSourceSpec(
            name="local",
            load="fwk_loaders.local.source:LocalSource",
            rank=100,
            summary="a folder or file that exists",
        )
    ]
