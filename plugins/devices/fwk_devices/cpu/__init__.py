"""The processor this runs on."""

from fwk import DeviceSpec, hookimpl


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="cpu",
            load="fwk_devices.cpu.device:Cpu",
            summary="the processor and its memory, which all workers share",
        )
    ]
