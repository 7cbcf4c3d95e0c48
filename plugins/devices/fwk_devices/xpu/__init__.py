"""Intel GPUs."""

from fwk import DeviceSpec, hookimpl
from fwk_devices._common.numa import NumaOptions


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="xpu",
            load="fwk_devices.xpu.device:Xpu",
            options=NumaOptions,
            rank=10,
            is_automatic=False,
            summary="an Intel GPU for each worker, with torch's kernels; not yet run on one",
        )
    ]
