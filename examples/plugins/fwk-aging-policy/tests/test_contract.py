"""What every schedule policy, and every observer, must do."""

from fwk_aging_policy.contract import TestAging, TestAgingMetrics

__all__ = ["TestAging", "TestAgingMetrics"]
