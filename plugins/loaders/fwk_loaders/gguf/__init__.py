"""Reads GGUF files: weights, configuration, tokeniser and chat template in one file."""

from fwk import LoaderSpec, hookimpl


@hookimpl
def loaders() -> list[LoaderSpec]:
    """Declare the loader."""
    return [
        LoaderSpec(
            name="gguf",
            load="fwk_loaders.gguf.loader:GGUFLoader",
            rank=20,
            summary="GGUF files (llama.cpp); block-quantised weights are de-quantised while loading",
        )
    ]
