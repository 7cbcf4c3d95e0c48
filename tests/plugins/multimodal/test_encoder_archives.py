"""Files of arrays that servers send each other: what would take more memory than they have bytes is not read."""

from __future__ import annotations

import io
import struct
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fwk_files.zipped import MAX_DIRECTORY_BYTES
from fwk_multimodal.media import encoder_servers
from fwk_multimodal.media.archives import BadArchive, check_arrays
from fwk_multimodal.media.encoder_servers import (
    MAX_PIECES,
    SIGNATURE,
    EncodedRows,
    EncodeOrder,
    EncoderServer,
    media_of,
    sign,
)
from fwk_multimodal.media.encoding_messages import Encode

SECRET = b"0123456789abcdef"


def saved(save: Any = np.savez, **arrays: np.ndarray) -> bytes:
    made = io.BytesIO()
    save(made, **arrays)
    return made.getvalue()


def member(content: bytes, name: str = "0.x.npy") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, content)
    return made.getvalue()


def header(shape: str, kind: str = "<f4", more: bytes = b"") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + more


def twice(content: bytes) -> bytes:
    """The directory names the one member many times."""
    start, end = content.rindex(b"PK\1\2"), content.rindex(b"PK\5\6")
    names, last = content[start:end] * 9, bytearray(content[end:])
    struct.pack_into("<2HL", last, 8, 9, 9, len(names))
    return content[:start] + names + bytes(last)


def behind(content: bytes, change: Any) -> bytes:
    end = content.rindex(b"PK\5\6")
    return content[:end] + change(content[end:])


GOOD = saved(
    **{"0.x": np.arange(6.0).reshape(2, 3), "0.y": np.array(3), "1.x": np.zeros((0, 4)), "1.z": np.array(True)}
)
ZEROS = np.zeros(2**20, np.float32)
BAD = {
    "compressed": (saved(np.savez_compressed, **{"0.x": ZEROS}), "holds compressed arrays, which are not read"),
    "named many times": (twice(saved(**{"0.x": ZEROS})), r"holds arrays of 37749888 bytes in \d{7}"),
    "a large shape": (member(header("(1099511627776,)")), r"of \d+ bytes whose header says 4398046511104"),
    "a large number": (member(header("(3,)", "<V2147483647")), "whose header says 6442450941"),
    "a negative shape": (member(header("(-1,)")), "whose header says -4"),
    "more than it says": (member(header("(1,)", more=bytes(8))), r"of \d+ bytes whose header says 4"),
    "objects": (member(header("(1,)", "|O", bytes(8))), "whose header says 8"),
    "a nested header": (member(header("-" * 9000 + "1")), "is a damaged file of arrays"),
    "a long header": (member(header("(" + "1," * 6000 + ")")), "is a damaged file of arrays"),
    "another form": (member(b"\x93NUMPY\x02\x00" + bytes(99)), "holds an array of another form"),
    "no array": (member(b"text"), "is a damaged file of arrays"),
    "one array": (header("(1099511627776,)"), "is no zip file, or cut short"),
    "nothing": (b"", "is no zip file, or cut short"),
    "cut short": (GOOD[:-9], "is no zip file, or cut short"),
    "a comment": (behind(GOOD, lambda end: end[:-2] + b"\1\0a"), "is no zip file, or cut short"),
    "another end": (behind(GOOD, lambda end: b"PK\6\7" + bytes(16) + end), "is no zip file, or cut short"),
    "many names": (
        behind(GOOD, lambda end: end[:12] + struct.pack("<L", MAX_DIRECTORY_BYTES + 1) + end[16:]),
        "has more than 4 MiB of names",
    ),
}


def test_what_numpy_writes_is_taken(tmp_path: Path) -> None:
    check_arrays(io.BytesIO(GOOD))
    (tmp_path / "payload").write_bytes(GOOD)
    found = media_of(EncodeOrder("", "", "image", [2, 1]), tmp_path / "payload")
    assert [(item.index, item.length, len(item.key)) for item in found] == [(0, 2, 32), (1, 1, 32)]
    alone = saved(**{"0.x": np.zeros((0, 4)), "0.z": np.array(True), "10.x": np.array(1)})
    (tmp_path / "alone").write_bytes(alone)
    [again] = media_of(EncodeOrder("", "", "image", [1]), tmp_path / "alone")
    assert again.key == found[1].key, "a piece is known by its own arrays, whatever its number"


@pytest.mark.parametrize("name", BAD)
def test_what_takes_more_than_was_sent_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before numpy sees it."""
    content, why = BAD[name]
    with pytest.raises(BadArchive, match=why):
        check_arrays(io.BytesIO(content))
    monkeypatch.setattr(encoder_servers.np, "load", lambda *args, **named: pytest.fail("numpy reads it"))
    (tmp_path / "payload").write_bytes(content)
    with pytest.raises(ValueError, match=f"^its payload .*{why}"):
        media_of(EncodeOrder("", "", "image", [1]), tmp_path / "payload")


def test_an_order_of_more_pieces_than_there_are_is_refused(tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(GOOD)
    with pytest.raises(ValueError, match="it holds more than 4096 pieces"):
        media_of(EncodeOrder("", "", "image", [1] * (MAX_PIECES + 1)), tmp_path / "payload")


def test_an_answer_that_takes_more_than_was_sent_is_refused(tmp_path: Path) -> None:
    """By a server that asks another: its next message, and /health, say why."""
    rows = saved(np.savez_compressed, **{"0.rows.float32": ZEROS.view(np.uint8)})

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            order = msgspec.msgpack.decode(self.rfile.read(int(self.headers["content-length"])), type=EncodeOrder)
            body = msgspec.msgpack.encode(EncodedRows(order.nonce, rows))
            self.send_response(200)
            self.send_header(SIGNATURE, sign(SECRET, body, is_answer=True))
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    np.savez(tmp_path / "payload.npz", allow_pickle=False, **{"0.x": np.arange(4)})
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        asked = EncoderServer(f"http://127.0.0.1:{server.server_port}", SECRET, "same")
        with pytest.raises(EOFError):
            asked.ask(Encode("image", [(str(tmp_path / "payload.npz"), 0, 4, str(tmp_path / "rows.npz"))]))
    assert asked.end() == "cannot be used: its answer holds compressed arrays, which are not read"
    assert not (tmp_path / "rows.npz").exists()
