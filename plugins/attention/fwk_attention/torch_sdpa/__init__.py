"""Paged attention in plain torch: runs anywhere, and is the reference for every other backend."""

from fwk import AttentionBackendSpec, hookimpl


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        AttentionBackendSpec(
            name="torch",
            load="fwk_attention.torch_sdpa.backend:TorchBackend",
            features=frozenset({"sliding_window"}),
            summary="Plain torch on any device; the reference.",
        )
    ]
