"""The processor this runs on."""

from fwk import DeviceSpec, hookimpl
from fwk_devices._common.numa import NumaOptions


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="cpu",
            load="fwk_devices.cpu.device:Cpu",
            options=NumaOptions,
            summary="the processor and its memory, which all workers share",
        )
    ]
