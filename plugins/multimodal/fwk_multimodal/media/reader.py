"""What the URLs of images and the like in requests hold."""

from __future__ import annotations

import base64
import binascii
import os
import stat
import threading
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from fwk.errors import ConfigError, InvalidRequest, NotServed
from fwk_http.clients import BadReply
from fwk_http.fetch import Hosts, Refused, fetch
from fwk_multimodal.media import MediaOptions

_PLAIN = bytes.maketrans(b"-_", b"+/")
"""From base64's alphabet for URLs to the plain one: it is written in lines, without its padding, and in either."""

_SPACE = b" \t\n\r\f\v"

_ESCAPED = {"%2B": "+", "%2F": "/", "%3D": "=", "%0A": "", "%0D": "", "%20": ""}
"""Of base64 in a URL. Replaced before what is left is decoded one by one."""

MAX_ESCAPES = 2**16
"""Of a ``data:`` URL; each costs half a microsecond and 60 bytes."""

MAX_FETCHES = 8
"""At once: each holds a thread of those that read bodies."""


class MediaReader:
    """Reads ``data:`` URLs, files below a folder that the operator named, and from hosts that they listed."""

    def __init__(self, options: MediaOptions) -> None:
        """Raises ``ConfigError`` for a folder that is not there, and for what is no host."""
        self._max_bytes = options.max_media_bytes
        self._folder = Path(options.allowed_local_media_path).resolve() if options.allowed_local_media_path else None
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(f"--allowed-local-media-path {options.allowed_local_media_path} is no folder")
        try:
            self._hosts = Hosts(options.allowed_media_hosts)
        except ValueError as error:
            raise ConfigError(f"--allowed-media-hosts: {error}") from None
        self._fetching = threading.Semaphore(MAX_FETCHES)

    def read(self, url: str, name: str) -> bytes:
        """The content. Raises ``InvalidRequest`` that calls it ``name``."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            data = self._of_data(url, name)
        elif scheme == "file":
            data = self._of_file(url, name)
        elif scheme in ("http", "https") and self._hosts:
            data = self._fetched(url, name)
        else:
            raise InvalidRequest(
                f"{name} is no data: URL: this server fetches nothing, so send the content as "
                "data:image/png;base64,... in its place",
                name,
            )
        if len(data) > self._max_bytes:
            raise self._too_large(name)
        return data

    def _of_data(self, url: str, name: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma:
            raise InvalidRequest(f"{name} is no data: URL: there is no comma before its content", name)
        if len(body) > 4 * self._max_bytes:
            raise self._too_large(name)
        is_base64 = head.lower().endswith(";base64")
        if is_base64 and "%" in body:
            for escape, character in _ESCAPED.items():
                body = body.replace(escape, character).replace(escape.lower(), character)
        if body.count("%") > MAX_ESCAPES:
            raise InvalidRequest(f"{name}: its data: URL has more than {MAX_ESCAPES} escapes: send it in base64", name)
        data = unquote_to_bytes(body)
        if not is_base64:
            return data
        text = data.translate(_PLAIN, _SPACE).rstrip(b"=")
        try:
            return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest(f"{name}: what follows the comma of its data: URL is not base64", name) from None

    def _of_file(self, url: str, name: str) -> bytes:
        if self._folder is None:
            raise InvalidRequest(f"{name}: this server reads no files (--allowed-local-media-path)", name)
        parts = urlsplit(url)
        refusal = InvalidRequest(f"{name} names no file below the folder that this server reads from", name)
        if parts.netloc not in ("", "localhost") or "\0" in unquote(parts.path):
            raise refusal
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not path.is_relative_to(self._folder):
                raise refusal
            # What was resolved has no links left; one that takes a file's place meanwhile is not followed.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise refusal
                return file.read(self._max_bytes + 1)
        except OSError:
            raise refusal from None

    def _fetched(self, url: str, name: str) -> bytes:
        if not self._fetching.acquire(blocking=False):
            raise NotServed("other requests' media are being fetched, as many as may be at once", 503, 1)
        try:
            return fetch(url, self._hosts, self._max_bytes)
        except (Refused, BadReply) as error:
            raise InvalidRequest(f"{name} is not fetched: {error} (--allowed-media-hosts)", name) from None
        finally:
            self._fetching.release()

    def _too_large(self, name: str) -> InvalidRequest:
        return InvalidRequest(f"{name} has more than {self._max_bytes} bytes (--max-media-bytes)", name)
