"""What the parts of the feature send one another."""

import msgspec


class Told(msgspec.Struct):
    """A number."""

    num_told: int = 0


class Other(msgspec.Struct):
    """No part can read it."""

    num_told: str = "none"
