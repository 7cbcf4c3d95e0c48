"""K/V over TCP, from the workers that compute prompts to those that decode."""

from __future__ import annotations

from fwk import KVTransferSpec, hookimpl
from fwk.interfaces.declaration import Needs
from fwk_kv_transfer._common.options import ListenerOptions


class TcpOptions(ListenerOptions):
    """Options of ``kv_transfer.tcp``."""


@hookimpl
def kv_transfers() -> list[KVTransferSpec]:
    return [
        KVTransferSpec(
            name="tcp",
            load="fwk_kv_transfer.tcp.transport:TcpTransfer",
            options=TcpOptions,
            needs=Needs(device="cpu"),
            summary="signed TCP connections between workers",
            api=2,
        )
    ]
