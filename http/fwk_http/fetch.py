"""Fetches what a client's URL names, from hosts that the operator lists and no others.

A name is looked up once, and the connection goes to what was found: no second answer of a name server counts. Names
may lead to public addresses alone; a private one must be listed itself, as a number. Redirects are looked at like URLs.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from fwk_http.clients import Allowance, BadReply, check_encoding

MAX_REDIRECTS = 3
MAX_URL = 8_192
SECONDS = 60.0
"""For all of a fetch, redirects included."""

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Refused(Exception):
    """A URL that is not fetched. The message says why, for the client that sent it."""


class Place(NamedTuple):
    """Where a URL leads."""

    scheme: str
    host: str
    port: int
    path: str


class Hosts:
    """Those that may be fetched from: ``example.org``, ``*.example.org`` for all names below, ``10.0.0.7:8080``.

    Without a port an entry is for 80 and 443. An address that is not public must be an entry itself.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        """Raises ``ValueError`` that names a wrong entry."""
        self._entries = [_entry(text) for text in entries]

    def __bool__(self) -> bool:
        return bool(self._entries)

    def place(self, url: str) -> Place:
        """Raises ``Refused`` for a URL of another kind or host."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            raise Refused("it is no URL") from None
        scheme = parts.scheme.lower()
        if scheme not in _PORTS or not host or len(url) > MAX_URL or any(c <= " " or c == "\x7f" for c in url):
            raise Refused("it is no http: or https: URL")
        if parts.username is not None or parts.password is not None:
            raise Refused("URLs with a user's name or password are not fetched")
        found = Place(
            scheme, host, port or _PORTS[scheme], (parts.path or "/") + (f"?{parts.query}" * bool(parts.query))
        )
        if not any(self._is_of(found, *entry) for entry in self._entries):
            raise Refused("its host is none that this server fetches from")
        return found

    def _is_of(self, place: Place, host: str, port: int | None) -> bool:
        ports = _PORTS.values() if port is None else (port,)
        is_host = place.host.endswith(host[1:]) if host.startswith("*.") else place.host == host
        return place.port in ports and is_host

    def address(self, place: Place) -> str:
        """What the name is at, looked up now. Raises ``Refused`` for a name at an address that is not public."""
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise Refused("its host is not found") from None
        addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
        listed = {host for host, _ in self._entries}
        if not addresses or not all(_is_public(x) or (x in listed and x == place.host) for x in addresses):
            raise Refused("its host is not at a public address")
        return addresses[0]


def _entry(text: str) -> tuple[str, int | None]:
    parts = urlsplit(f"//{text.strip()}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    bare = (host or "").removeprefix("*.")
    if not bare or "*" in bare or parts.path or parts.query or "@" in text:
        raise ValueError(f"{text!r} is no host: say example.org, *.example.org or 10.0.0.7:8080")
    return str(host).rstrip("."), port


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            address = inner
    return address.is_global and not address.is_multicast


def fetch(url: str, hosts: Hosts, max_bytes: int, seconds: float = SECONDS) -> bytes:
    """What a URL names, of at most ``max_bytes``. Blocks for ``seconds`` at most, but for the look-up of names.

    Raises ``Refused`` for a URL that is not fetched, and ``BadReply`` for a server that does not answer with it.
    """
    allowed = Allowance(max_bytes, seconds, float("inf"))
    place = hosts.place(url)
    for _ in range(MAX_REDIRECTS + 1):
        answer = _get(place, hosts.address(place), allowed)
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
        if place.scheme == "https" and urlsplit(url).scheme.lower() != "https":
            raise Refused("it leads from https: to another scheme")
        place = hosts.place(url)
    raise Refused(f"it leads on more than {MAX_REDIRECTS} times")


def _get(place: Place, address: str, allowed: Allowance) -> bytes | str:
    """The content, or where it is."""
    connection = _Pinned(place, address, max(allowed.seconds_left, 0.001))
    # Sockets' time-outs begin anew with each byte, and http.client reads heads itself.
    timer = threading.Timer(max(allowed.seconds_left, 0.001), connection.cut)
    timer.daemon = True
    timer.start()
    try:
        connection.request("GET", place.path, headers={"Accept-Encoding": "identity", "User-Agent": "fwk"})
        reply = connection.getresponse()
        location = reply.getheader("location")
        if reply.status in _REDIRECTS and location:
            return location
        if reply.status != 200:
            raise BadReply(f"its server answered with status {reply.status}")
        check_encoding(reply.headers)
        if (reply.length or 0) > allowed.bytes_left:
            raise BadReply(f"it has more than {allowed.bytes_left} bytes")
        pieces: list[bytes] = []
        while piece := reply.read1(65_536):
            allowed.take(len(piece))
            pieces.append(piece)
        if connection.was_cut or reply.length:
            raise BadReply("its server took too long" if connection.was_cut else "its server stopped before the end")
        return b"".join(pieces)
    except BadReply:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        late = connection.was_cut or isinstance(error, TimeoutError)
        raise BadReply("its server took too long" if late else "its server did not answer as one does") from None
    finally:
        timer.cancel()
        connection.close()


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that was looked up before, under the host's own name."""

    def __init__(self, place: Place, address: str, seconds: float) -> None:
        super().__init__(place.host, place.port, timeout=seconds)
        self._place, self._address = place, address
        self.was_cut = False

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self._place.port), self.timeout)
        if self._place.scheme == "https":
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self._place.host)

    def cut(self) -> None:
        """The time is over."""
        self.was_cut = True
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except (OSError, AttributeError):
            self.close()
