"""What every feature must do."""

from fwk_control_vectors.contract import TestControlVectors

__all__ = ["TestControlVectors"]
