"""K/V through files."""

from __future__ import annotations

from fwk import KVTransferSpec, Options, hookimpl, option


class MineOptions(Options):
    """Options of ``kv_transfer.mine``."""

    mine_folder: str = option("", "Folder both engines see; empty: that for temporary files.")


@hookimpl
def kv_transfers() -> list[KVTransferSpec]:
    return [
        KVTransferSpec(
            name="mine",
            load="fwk_mine.plugin:MineTransfer",
            options=MineOptions,
            summary="k/V through files",
            api=2,
        )
    ]
