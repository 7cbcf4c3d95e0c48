"""Random weights for a given configuration: to test and to measure without a real model."""

from fwk import LoaderSpec, hookimpl


@hookimpl
def loaders() -> list[LoaderSpec]:
    """Declare the loader; it is never chosen by ``auto``."""
    return [
        LoaderSpec(
            name="dummy",
            load="fwk_loaders.dummy.loader:DummyLoader",
            is_automatic=False,
            summary="random weights (always the same) for a folder's config.json; a byte tokeniser if there is none",
        )
    ]
