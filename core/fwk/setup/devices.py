"""Choose the device of a run: ``--device``, or for ``auto`` the best-ranked one that this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fwk.config import Config
from fwk.errors import ConfigError, PluginError
from fwk.interfaces.declaration import Host
from fwk.interfaces.device import Device, DeviceContext, DeviceSpec
from fwk.interfaces.parallel import ParallelGroup
from fwk.plugins import PluginFactory, PluginSet, Registered, find
from fwk.plugins.selection import AUTO, check_used, ranked

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """A kind of device that this machine has, and the machine as declarations see it."""

    name: str
    device: Device
    host: Host


def choose_device(config: Config, plugins: PluginSet) -> ChosenDevice:
    """Raises ``ConfigError`` for a device that is not there, ``PluginError`` when there is none at all."""
    requested = config.engine.device
    refusals: list[str] = []
    for item in [find(plugins, "devices", requested)] if requested != AUTO else _automatic(plugins):
        device, why = _build(config, plugins, item)
        if device is not None and why is None:
            check_used(plugins, config.plugin_options, {"devices": item.name})
            return ChosenDevice(item.name, device, device.host())
        refusals.append(f"--device {item.name}: {why}")
    if requested != AUTO:
        raise ConfigError(refusals[0])
    raise PluginError(f"no device can serve this run: {'; '.join(refusals) or 'none is installed'}")


def _automatic(plugins: PluginSet) -> list[Registered]:
    return [
        item
        for item in ranked(plugins, "devices")
        if isinstance(item.declaration, DeviceSpec) and item.declaration.is_automatic
    ]


def _build(config: Config, plugins: PluginSet, item: Registered) -> tuple[Device | None, str | None]:
    """The device, or why it is not to be had: it is not imported where its declaration lacks something."""
    lacking = item.declaration.needs.refusal(Host(device=item.name))
    if lacking is not None:
        return None, f"it {lacking}"
    device: Device = PluginFactory(plugins, config.plugin_options).build(item, DeviceContext)
    return device, device.missing()


def take_device(device: Device, name: str, group: ParallelGroup, engine_index: int) -> torch.device:
    """The device of a rank, for the calling thread. Where each needs one of its own, those of the first engine come
    first.

    Raises ``ConfigError`` when there are too few.
    """
    group.collective = device.collective
    index, count = engine_index * group.local_size + group.local_rank, device.count()
    if count is not None and index >= count:
        raise ConfigError(
            f"rank {group.rank} of engine {engine_index} needs a {name} device of its own, but {count} can be seen; "
            "lower --tensor-parallel-size or the number of engines, or look at CUDA_VISIBLE_DEVICES and its like"
        )
    return device.take(index)
