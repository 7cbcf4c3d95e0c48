"""The contract of the family."""

from fwk_kserve.contract import TestKServe

__all__ = ["TestKServe"]
