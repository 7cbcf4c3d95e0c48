"""Paged attention by torch's FlexAttention. Not yet run on a GPU."""

from __future__ import annotations

from fwk import AttentionBackendSpec, Facts, Needs, hookimpl


class FlexSpec(AttentionBackendSpec):
    """Named only: nothing has shown yet where it is worth having."""

    def auto_skip_reason(self, facts: Facts) -> str | None:
        where = "is unfused on a CPU" if facts.host.device == "cpu" else "has not been run on a GPU yet"
        return f"{where}: name it with --attention-backend {self.name}"


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        FlexSpec(
            name="flex",
            load="fwk_attention.flex.backend:FlexBackend",
            needs=Needs(packages=("torch>=2.11",)),
            kv_dtypes=("auto", "int8", "fp8_e4m3"),
            features=frozenset({"alibi_slopes", "chunk_size", "kv_groups", "sliding_window", "soft_cap"}),
            kv_layouts={"auto": "rows", "int8": "rows", "fp8_e4m3": "rows"},
            rank=-30,
            summary="torch's FlexAttention, compiled on a GPU (not yet run on one), unfused on a CPU.",
        )
    ]
