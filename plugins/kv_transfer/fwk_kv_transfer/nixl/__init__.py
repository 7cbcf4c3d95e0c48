"""K/V by NIXL (NVIDIA Inference Xfer Library): UCX reads the memory of the workers that compute prompts."""

from __future__ import annotations

from fwk import KVTransferSpec, hookimpl
from fwk.interfaces.declaration import Needs
from fwk_kv_transfer._common.options import ListenerOptions


class NixlOptions(ListenerOptions):
    """Options of ``kv_transfer.nixl``; UCX has its own, as environment variables (``UCX_TLS``, ``UCX_NET_DEVICES``)."""


@hookimpl
def kv_transfers() -> list[KVTransferSpec]:
    return [
        KVTransferSpec(
            name="nixl",
            load="fwk_kv_transfer.nixl.transport:NixlTransfer",
            options=NixlOptions,
            needs=Needs(device="cpu", packages=("nixl-cu12>=1.5,<2",)),
            rank=-10,  # tcp needs no package, and no port of its own
            summary="NIXL over UCX: RDMA, shared memory or TCP",
            api=2,
        )
    ]
