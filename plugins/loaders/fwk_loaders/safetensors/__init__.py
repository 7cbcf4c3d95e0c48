"""Reads Hugging Face style folders with safetensors weights, in one file or several."""

from fwk import LoaderSpec, hookimpl


@hookimpl
def loaders() -> list[LoaderSpec]:
    """Declare the loader."""
    return [
        LoaderSpec(
            name="safetensors",
            load="fwk_loaders.safetensors.loader:SafetensorsLoader",
            rank=30,
            summary="folders with config.json and .safetensors files, as on model hubs",
        )
    ]
