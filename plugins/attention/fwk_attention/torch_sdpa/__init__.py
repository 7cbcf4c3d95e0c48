"""Paged attention in plain torch: runs anywhere, and is the reference for every other backend."""

from fwk import AttentionBackendSpec, hookimpl


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        AttentionBackendSpec(
            name="torch",
            load="fwk_attention.torch_sdpa.backend:TorchBackend",
            kv_dtypes=("auto", "int8", "fp8_e4m3"),
            features=frozenset(
                {
                    "kv_groups",
                    "sliding_window",
                    "soft_cap",
                    "tree_mask",
                    "latent",
                    "sinks",
                    "alibi_slopes",
                    "chunk_size",
                    "distance_bias",
                    "cross_attention",
                }
            ),
            kv_layouts={"auto": "rows", "int8": "rows", "fp8_e4m3": "rows"},
            summary="Plain torch on any device; the reference.",
        )
    ]
