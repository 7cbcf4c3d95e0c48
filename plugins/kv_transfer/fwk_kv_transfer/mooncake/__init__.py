"""K/V by Mooncake's transfer engine (Qin et al. 2025), which reads the memory of the workers that compute prompts."""

from __future__ import annotations

from fwk import KVTransferSpec, hookimpl, option
from fwk.interfaces.declaration import Needs
from fwk_kv_transfer._common.options import ListenerOptions


class MooncakeOptions(ListenerOptions):
    """Options of ``kv_transfer.mooncake``."""

    disaggregation_ib_device: str = option(
        "",
        "InfiniBand devices that Mooncake reads by, as mlx5_0,mlx5_1; without any it reads by TCP.",
        stability="experimental",
        max_length=1024,
    )


@hookimpl
def kv_transfers() -> list[KVTransferSpec]:
    return [
        KVTransferSpec(
            name="mooncake",
            load="fwk_kv_transfer.mooncake.transport:MooncakeTransfer",
            options=MooncakeOptions,
            needs=Needs(device="cpu", packages=("mooncake-transfer-engine-non-cuda>=0.3.13,<0.4",)),
            rank=-10,  # tcp needs no package, and no port of its own
            summary="Mooncake's transfer engine: RDMA or TCP",
            api=2,
        )
    ]
