"""NVTX ranges around steps, for Nsight Systems. Off until ``--enable-nvtx`` is given."""

from fwk import ObserverSpec, Options, hookimpl, option


class NvtxOptions(Options):
    """Options of ``observers.nvtx``."""

    enable_nvtx: bool = option(
        False, "Put an NVTX range around each step's launch, for Nsight Systems (NVIDIA's GPUs).", aliases=["ft-nvtx"]
    )


@hookimpl
def observers() -> list[ObserverSpec]:
    return [
        ObserverSpec(
            name="nvtx",
            load="fwk.interfaces.observer:Observer",
            worker="fwk_observability.nvtx.worker:WorkerRanges",
            options=NvtxOptions,
            enabled_by=("enable_nvtx",),
            summary="NVTX ranges around steps, on an NVIDIA GPU",
        )
    ]
