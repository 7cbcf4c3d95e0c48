"""Intel GPUs."""

from fwk import DeviceSpec, hookimpl


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="xpu",
            load="fwk_devices.xpu.device:Xpu",
            rank=10,
            is_automatic=False,
            summary="an Intel GPU for each worker, with torch's kernels; not yet run on one",
        )
    ]
