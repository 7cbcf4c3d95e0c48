"""What parts send one another, on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fwk.types import Features

_encode = msgspec.msgpack.Encoder().encode


def packed(struct: msgspec.Struct | msgspec.Raw) -> msgspec.Raw:
    """A struct as it is sent; what is packed already stays."""
    return struct if isinstance(struct, msgspec.Raw) else msgspec.Raw(_encode(struct))


class Reader:
    """Reads one kind of what is sent. kinds: by feature, the class; None: the feature sends none."""

    def __init__(self, kinds: Mapping[str, type[msgspec.Struct] | None]) -> None:
        self._decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in kinds.items() if kind is not None}

    def read(self, features: Features, name: str) -> Any:
        """What a feature sent; None if nothing."""
        raw = features.get(name)
        decoder = self._decoders.get(name)
        return None if raw is None or decoder is None else decoder.decode(raw)
