"""Attention over the tokens that count most, found by the channels that count most.

Yang et al., Post-Training Sparse Attention with Double Sparsity (arXiv:2408.07092).
"""

from __future__ import annotations

from typing import Literal

from fwk import AttentionBackendSpec, Facts, Options, hookimpl, option

NAME = "double_sparsity"


class DoubleSparsityOptions(Options):
    """Options of ``attention.double_sparsity``."""

    ds_channel_config_path: str = option(
        "",
        "The file of each head's channels, heaviest first; fwk heavy-channels MODEL --out FILE makes it.",
        stability="experimental",
    )
    ds_heavy_channel_num: int = option(
        16, "Channels of a key that are read of every token.", stability="experimental", ge=1
    )
    ds_heavy_token_num: int = option(
        256, "Tokens that a head attends to, of a text past the threshold.", stability="experimental", ge=1
    )
    ds_heavy_channel_type: Literal["q", "k", "qk"] = option(
        "qk",
        "Whose channels are heavy: of queries, of keys, or of their products.",
        stability="experimental",
    )
    ds_sparse_decode_threshold: int = option(
        4096,
        "Up to so many tokens a text has all of them attended to, and prompts have at any length.",
        stability="experimental",
        ge=0,
    )


class DoubleSparsitySpec(AttentionBackendSpec):
    """Named only: it changes a model's numbers."""

    def refusal(self, facts: Facts) -> str | None:
        if facts.num_kv_heads % facts.tp_size:
            return f"gives each rank KV heads of its own: {facts.num_kv_heads} are too few for {facts.tp_size} ranks"
        if facts.drafts in ("chain", "tree"):
            return "attends to fewer tokens one at a time than while drafts are verified: drafts would change the text"
        return super().refusal(facts)

    def auto_skip_reason(self, facts: Facts) -> str | None:
        return (
            f"attends to some of the tokens, which changes a model's numbers: name it with --attention-backend {NAME}"
        )


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        DoubleSparsitySpec(
            name=NAME,
            load="fwk_attention.double_sparsity.backend:DoubleSparsityBackend",
            options=DoubleSparsityOptions,
            kv_dtypes=("auto", "int8", "fp8_e4m3"),
            switches=("enable-double-sparsity",),
            features=frozenset({"kv_groups", "sliding_window"}),
            rank=-40,
            summary="Of long texts, each head attends to the tokens that count most; no faster on a CPU.",
        )
    ]
