"""The contracts of the two families."""

from __future__ import annotations

from fwk.testing import ObserverSuite, SchedulePolicySuite


class TestAging(SchedulePolicySuite):
    plugin = "aging"


class TestAgingMetrics(ObserverSuite):
    plugin = "aging"
    options = {"aging_metrics": True}
