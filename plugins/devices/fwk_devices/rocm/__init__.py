"""AMD GPUs."""

from fwk import DeviceSpec, hookimpl
from fwk_devices._common.numa import NumaOptions


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="rocm",
            load="fwk_devices.rocm.device:Rocm",
            options=NumaOptions,
            rank=20,
            summary="an AMD GPU for each worker, with torch's kernels; not yet run on one",
        )
    ]
