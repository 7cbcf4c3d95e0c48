"""Apple's GPUs."""

from fwk import DeviceSpec, hookimpl


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="mps",
            load="fwk_devices.mps.device:Mps",
            rank=10,
            is_automatic=False,
            summary="the GPU of an Apple machine, with torch's kernels; not yet run on one",
        )
    ]
