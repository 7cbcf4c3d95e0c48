"""Every schedule policy does what the contract says."""

from __future__ import annotations

from fwk_kit.testing import SchedulePolicySuite


class TestFcfs(SchedulePolicySuite):
    plugin = "fcfs"


class TestLpm(SchedulePolicySuite):
    plugin = "lpm"


class TestSjf(SchedulePolicySuite):
    plugin = "sjf"


class TestSession(SchedulePolicySuite):
    plugin = "session"


class TestFair(SchedulePolicySuite):
    plugin = "fair"


class TestSla(SchedulePolicySuite):
    plugin = "sla"


class TestPriority(SchedulePolicySuite):
    plugin = "priority"


class TestRandomOrder(SchedulePolicySuite):
    plugin = "random"


class TestDfsWeight(SchedulePolicySuite):
    plugin = "dfs-weight"


class TestLof(SchedulePolicySuite):
    plugin = "lof"


class TestReserve(SchedulePolicySuite):
    plugin = "reserve"
