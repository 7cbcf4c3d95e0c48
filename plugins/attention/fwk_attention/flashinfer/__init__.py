"""Paged attention by FlashInfer's kernels. Written against its documentation; not yet run on a GPU."""

from fwk import AttentionBackendSpec, Needs, hookimpl


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        AttentionBackendSpec(
            name="flashinfer",
            load="fwk_attention.flashinfer.backend:FlashInferBackend",
            needs=Needs(device="cuda", packages=("flashinfer-python>=0.6",), compute_capability=(8, 0)),
            dtypes=("float16", "bfloat16"),
            kv_dtypes=("auto",),  # its kernels take one scale for all of K, ours are one per token and head
            head_sizes=(64, 128, 256),
            features=frozenset({"kv_groups", "sliding_window", "soft_cap", "tree_mask"}),
            rank=-20,  # auto takes it once a GPU has shown that it is right
            summary="FlashInfer's paged kernels for CUDA; an adapter that has not yet run on a GPU.",
        )
    ]
