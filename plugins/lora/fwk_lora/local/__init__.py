"""LoRA adapters from local folders, in the layout PEFT saves.

The server's administrator may name folders below those given with ``--lora-dirs`` while it runs, by a path relative to
one of them or a whole one. What leads out of them (``..``, a symbolic link) is as unknown as what is not there.
Adapters of ``--lora-paths`` may lie anywhere.
"""

from fwk import LoRASourceSpec, Options, hookimpl, option


class LocalAdapterOptions(Options):
    """Options of ``lora_sources.local``."""

    lora_dirs: tuple[str, ...] = option(
        (), "Folders that hold LoRA adapters for --admin-api-key to load while the server runs (default: none)."
    )
    max_lora_model_size: int = option(
        -1,
        "Largest weights file of an adapter, in bytes; larger ones are refused before they are read. -1: no limit.",
        ge=-1,
        le=2**50,
    )


@hookimpl
def lora_sources() -> list[LoRASourceSpec]:
    return [
        LoRASourceSpec(
            name="local",
            load="fwk_lora.local.source:LocalAdapters",
            options=LocalAdapterOptions,
            summary="adapters in local folders, as PEFT saves them",
        )
    ]
