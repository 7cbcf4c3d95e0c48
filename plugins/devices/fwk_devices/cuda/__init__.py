"""NVIDIA GPUs."""

from fwk import DeviceSpec, hookimpl
from fwk_devices._common.numa import NumaOptions


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="cuda",
            load="fwk_devices.cuda.device:Cuda",
            options=NumaOptions,
            rank=20,
            summary="an NVIDIA GPU for each worker; not yet run on one",
        )
    ]
