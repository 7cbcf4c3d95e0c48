"""Plain HTTP clients."""

from __future__ import annotations

import ssl

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For httpx's ``verify``: otherwise every client, and so every ``httpx.get``, reads all certificates first (40 ms)."""
