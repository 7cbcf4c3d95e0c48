"""The header of an entry that outlives the process: whose bytes they are, and whether they are whole.

offset  bytes
0       8       "fwk kv 1"
8       32      identity: what model, precision, layout and rank the bytes are of
40      32      key: what content they are of
72      8       number of bytes that follow the header, little-endian
80      32      blake2b of everything else: the header before it, and the bytes after
112     ...     the bytes
"""

from __future__ import annotations

import hashlib
import struct

MAGIC = b"fwk kv 1"
HEADER_BYTES = 112


def header(identity: bytes, key: bytes, data: memoryview) -> bytes:
    """The header of ``data``; any other bytes before it mean another entry, or a damaged one."""
    head = struct.pack("<8s32s32sQ", MAGIC, identity, key, data.nbytes)
    digest = hashlib.blake2b(head, digest_size=32)
    digest.update(data)
    return head + digest.digest()


def name_of(identity: bytes, key: bytes) -> str:
    """A name for the entry that tells nothing of its content."""
    return hashlib.blake2b(key, key=identity, digest_size=20).hexdigest()
