"""Fewer, larger events of a stream (``--stream-interval``)."""

from __future__ import annotations

from collections.abc import Iterable

from fwk.interfaces.dialect import OutputDelta


class DeltaBuffer:
    """Holds a sequence's deltas back until they have ``interval`` tokens; the first and the last one never wait."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, OutputDelta] = {}
        self._begun: set[int] = set()

    def ready(self, deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
        """What may go to the client now, given what has come."""
        found: list[OutputDelta] = []
        for delta in deltas:
            held = self._held.pop(delta.index, None)
            delta = delta if held is None else held.joined(delta)
            is_first = delta.index not in self._begun
            if is_first or delta.finish_reason is not None or len(delta.token_ids) >= self._interval:
                self._begun.add(delta.index)
                found.append(delta)
            else:
                self._held[delta.index] = delta
        return found
