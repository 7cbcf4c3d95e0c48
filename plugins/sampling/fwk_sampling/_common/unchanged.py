"""Settings on a device, which most steps find as the step before left them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fwk.interfaces.device import Upload


class Unchanged:
    """Sends an array to the device only when its numbers are not those of the call before."""

    def __init__(self, send: Upload) -> None:
        self._send = send
        self._last: tuple[np.ndarray, Tensor] | None = None

    def send(self, values: np.ndarray) -> Tensor:
        """The numbers on the device, to be read only. ``values`` is not written to after this call."""
        if self._last is None or not np.array_equal(values, self._last[0]):
            self._last = values, self._send(values)
        return self._last[1]
