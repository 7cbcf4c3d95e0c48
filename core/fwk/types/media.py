"""Images and the like in a prompt: which of its tokens they stand for, and where what is encoded of them lies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import msgspec

NUM_KEY_BYTES = 32


class Media(msgspec.Struct, frozen=True, array_like=True):
    """A piece of media that a model encodes at once. Its rows take the place of ``length`` tokens' embeddings.

    key: a hash of the content, and of everything that the arrays made of it depend on. payload: a file on this machine
    (numpy's npz), which is there until the request has ended; its arrays for this piece are named ``INDEX.NAME``.
    """

    key: bytes  # NUM_KEY_BYTES
    kind: str
    start: int  # the first of its tokens in the prompt
    length: int
    payload: str
    index: int

    @property
    def end(self) -> int:
        """The place after its last token."""
        return self.start + self.length


def cache_ids(token_ids: Sequence[int], media: Sequence[Media]) -> list[int]:
    """A prompt as prefix caches know it: a placeholder's id is a word of its media's hash.

    The words of a hash come one after another, so that eight tokens or more hold all of it. They are negative, so that
    none is a token's id, and of 32 bits, as ids are.
    """
    ids = list(token_ids)
    for item in media:
        words = [~(int.from_bytes(item.key[i : i + 4], "little") >> 1) for i in range(0, NUM_KEY_BYTES, 4)]
        ids[item.start : item.end] = islice(cycle(words), item.length)
    return ids
