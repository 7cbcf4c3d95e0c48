"""Reads GGUF files: weights, configuration, tokeniser and chat template in one file."""

from pathlib import Path

from fwk import LoaderSpec, hookimpl


@hookimpl
def loaders() -> list[LoaderSpec]:
    """Declare the loader."""
    return [
        LoaderSpec(
            name="gguf",
            load="fwk_loaders.gguf.loader:GGUFLoader",
            rank=20,
            kernels=(Path(__file__).with_name("blocks.cpp"),),
            summary="GGUF files (llama.cpp); block-quantised weights are de-quantised while loading",
        )
    ]
