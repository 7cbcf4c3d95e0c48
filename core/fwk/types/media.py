"""Images and the like in a prompt: which of its tokens they stand for, and where what is encoded of them lies."""

from __future__ import annotations

import msgspec


class Media(msgspec.Struct, frozen=True, array_like=True):
    """A piece of media that a model encodes at once. Its rows take the place of ``length`` tokens' embeddings.

    key: a hash (32 bytes) of the content, and of everything that the arrays made of it depend on. payload: a file on
    this machine (numpy's npz), there until the request has ended; its arrays for this piece are named ``INDEX.NAME``.

    - ``kind``: ``image``, ``audio`` or ``video``.
    - ``start``: the first of its tokens in the prompt
    - ``index``: of its arrays in the file.
    """

    key: bytes
    kind: str
    start: int
    length: int
    payload: str
    index: int

    @property
    def end(self) -> int:
        """The place after its last token."""
        return self.start + self.length
