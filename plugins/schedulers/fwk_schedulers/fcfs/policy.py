"""Arrival order."""

from __future__ import annotations

from fwk.interfaces.schedule import SchedulePolicy


class FirstComeFirstServed(SchedulePolicy):
    """The answers every policy gives unless it says otherwise."""
