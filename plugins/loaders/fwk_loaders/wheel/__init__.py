"""Models that are published as packages of the Python package index."""

from fwk import ModelSourceSpec, hookimpl


@hookimpl
def model_sources() -> list[ModelSourceSpec]:
    """Declare the source."""
    return [
        ModelSourceSpec(
            name="wheel",
            load="fwk_loaders.wheel.source:WheelSource",
            rank=50,
            summary="known models inside wheels: smollm2-135m-instruct, gemma3-270m, all-minilm-l6-v2",
        )
    ]
