"""What every feature must do."""

from fwk_pii.contract import TestPii

__all__ = ["TestPii"]
