"""Encoders in other servers: what is sent there, the route that answers, and a server as a pool of encoders sees it."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import io
import json
import secrets
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from fwk.interfaces.multimodal import Media
from fwk.types import ModelConfig
from fwk_http.clients import Allowance, BadReply, check_encoding
from fwk_multimodal.media.archives import check_arrays
from fwk_multimodal.media.encoding_messages import Answer, Encode

PATH = "/encode_media"
SIGNATURE = "x-fwk-signature"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 120.0
MAX_ANSWER_BYTES = 2**31
"""Of the rows of pieces that were sent at once."""

MAX_PIECES = 4096
"""Of an order: what --mm-encoder-batch-size allows."""


class EncodeOrder(msgspec.Struct, frozen=True):
    """Pieces of one kind: of each its tokens. Of none: whether the two servers have the same model.

    payload: an npz file of their arrays, named ``NUMBER.NAME``. nonce: comes back, so that no old answer is taken.
    """

    identity: str
    nonce: str
    kind: str = ""
    lengths: list[int] = []
    payload: bytes = b""


class EncodedRows(msgspec.Struct, frozen=True):
    """rows: an npz file of ``NUMBER.rows.DTYPE``."""

    nonce: str
    rows: bytes = b""


def identity_of(config: ModelConfig, sizes: list[int]) -> str:
    """What two servers have in common whose rows are the same: the configuration, and the sizes of weight files."""
    told = {name: value for name, value in config.raw.items() if not name.startswith("_")}
    text = json.dumps([told, sorted(sizes)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def sign(secret: bytes, body: bytes, *, is_answer: bool) -> str:
    """The signature of a body: what the other side said cannot be passed off as it."""
    way = b"answer " if is_answer else b"question "
    return hmac.digest(secret, b"fwk encoding " + way + body, "sha256").hex()


def is_signed(secret: bytes, body: bytes, given: str, *, is_answer: bool) -> bool:
    """Whether ``given`` is its signature."""
    return hmac.compare_digest(given.encode(), sign(secret, body, is_answer=is_answer).encode())


def media_of(order: EncodeOrder, path: Path) -> list[Media]:
    """The pieces of an order whose payload is at ``path``, known by their content. Raises ``ValueError``."""
    if len(order.lengths) > MAX_PIECES:
        raise ValueError(f"it holds more than {MAX_PIECES} pieces")
    with path.open("rb") as payload:
        try:
            check_arrays(payload)
        except ValueError as error:
            raise ValueError(f"its payload {error}") from None
    found: list[Media] = []
    try:
        with np.load(path, allow_pickle=False) as file:
            names: dict[str, list[str]] = {}
            for name in sorted(file.files):
                names.setdefault(name.partition(".")[0], []).append(name)
            for i, length in enumerate(order.lengths):
                key = hashlib.sha256(order.kind.encode())
                for name in names.get(str(i), ()):
                    x = np.ascontiguousarray(file[name])
                    key.update(f"\0{name.partition('.')[2]}\0{x.dtype.str}{x.shape}\0".encode())
                    key.update(x.data)
                found.append(Media(key.digest(), order.kind, 0, length, str(path), i))
    except Exception as error:
        raise ValueError("its payload cannot be read") from error
    return found


class _Refused(Exception):
    """The other server does not take what it was sent; the sentence says why."""


class EncoderServer:
    """Another server. ``ask`` blocks; ``kill`` ends what is asked, from any thread."""

    def __init__(self, url: str, secret: bytes, identity: str) -> None:
        self.name = f"encoder server {url}"
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._secret = secret
        self._identity = identity
        self._why = ""
        self._asking = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._is_closed = False

    def ask(self, message: msgspec.Struct) -> Answer:
        """Raises ``EOFError`` where it cannot be used."""
        order = EncodeOrder(self._identity, secrets.token_hex(16))
        targets: list[str] = []
        try:
            if isinstance(message, Encode):
                targets = [target for *_, target in message.pieces]
                lengths = [length for _, _, length, _ in message.pieces]
                payload = _gathered(message.pieces)
                order = msgspec.structs.replace(order, kind=message.kind, lengths=lengths, payload=payload)
            with self._asking:
                found = self._post(order)
            _write(found.rows, targets)
        except _Refused as error:
            return Answer(str(error))
        except (OSError, http.client.HTTPException, BadReply, ValueError) as error:
            said = str(error) if isinstance(error, BadReply) else getattr(error, "strerror", None) or _words(error)
            self._why = f"cannot be used: {said}"
            raise EOFError from None
        return Answer()

    def _post(self, order: EncodeOrder) -> EncodedRows:
        body = msgspec.msgpack.encode(order)
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=CONNECT_SECONDS, context=self._tls)
        self._connection = connection
        try:
            connection.connect()
            if self._is_closed:
                raise ConnectionAbortedError
            connection.sock.settimeout(ANSWER_SECONDS)
            signature = sign(self._secret, body, is_answer=False)
            connection.request("POST", PATH, body, {SIGNATURE: signature, "content-type": "application/msgpack"})
            reply = connection.getresponse()
            check_encoding(reply.headers)
            allowed, parts = Allowance(MAX_ANSWER_BYTES, ANSWER_SECONDS), list[bytes]()
            while piece := reply.read1(65_536):
                allowed.take(len(piece))
                parts.append(piece)
        finally:
            self._connection = None
            connection.close()
        return self._read(reply, b"".join(parts), order)

    def _read(self, reply: http.client.HTTPResponse, body: bytes, order: EncodeOrder) -> EncodedRows:
        refusals = {
            401: "it has another secret in --encoder-token-file",
            404: "it was not started with --encoder-only",
            409: "it serves another model, or other weights",
            413: "its --max-body-bytes is less than a piece of media has",
        }
        if reply.status in refusals:
            raise _Refused(f"{self.name}: {refusals[reply.status]}")
        if reply.status != 200:
            raise BadReply(f"it answered with {reply.status}")
        if not is_signed(self._secret, body, reply.headers.get(SIGNATURE, ""), is_answer=True):
            raise BadReply("its answer is not signed with the secret of --encoder-token-file")
        found = msgspec.msgpack.decode(body, type=EncodedRows)
        if found.nonce != order.nonce:
            raise BadReply("it answered something else")
        return found

    def kill(self) -> None:
        self._is_closed = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(2)

    def end(self) -> str:
        """Kill it, and say what was wrong."""
        self.kill()
        return self._why or "was given up"


def _words(error: BaseException) -> str:
    return "it did not answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}"


def _gathered(pieces: list[tuple[str, int, int, str]]) -> bytes:
    """The arrays of pieces, by their numbers, as one file."""
    arrays: dict[str, np.ndarray] = {}
    for i, (payload, index, _, _) in enumerate(pieces):
        with np.load(payload, allow_pickle=False) as file:
            names = [name for name in file.files if name.startswith(f"{index}.")]
            arrays |= {f"{i}.{name.removeprefix(f'{index}.')}": file[name] for name in names}
    made = io.BytesIO()
    np.savez(made, allow_pickle=False, **arrays)
    return made.getvalue()


def _write(rows: bytes, targets: list[str]) -> None:
    """Files of the rows of each piece, as a process writes them. Raises ``ValueError``, and ``BadReply``."""
    if not targets:
        return
    try:
        check_arrays(io.BytesIO(rows))
    except ValueError as error:
        raise BadReply(f"its answer {error}") from None
    try:
        with np.load(io.BytesIO(rows), allow_pickle=False) as file:
            found: Mapping[str, Any] = file
            for i, target in enumerate(targets):
                [name] = [name for name in file.files if name.startswith(f"{i}.rows.")]
                partial = Path(f"{target}.new")
                with partial.open("wb") as made:
                    np.savez(made, allow_pickle=False, **{name.removeprefix(f"{i}."): found[name]})
                partial.rename(target)
    except Exception as error:
        raise ValueError("the rows it sent cannot be read") from error
