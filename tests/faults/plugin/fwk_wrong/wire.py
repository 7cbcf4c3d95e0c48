"""What the parts of the feature send one another."""

import msgspec


class Told(msgspec.Struct):
    """A number."""

    num_told: int = 0
