"""How a tool server is named by an option."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def label_and_url(text: str) -> tuple[str, str]:
    """``NAME=URL``, or a URL, whose label is its host and port. Raises ``ValueError``."""
    label, has_label, url = text.partition("=")
    if not has_label or not _LABEL.fullmatch(label):
        label, url = "", text
    url = url if "://" in url else f"http://{url}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment or re.search(r"\s", url):
        raise ValueError(f"{text!r} is not [NAME=]URL of an MCP server, as in search=http://localhost:8001/mcp")
    if parts.username is not None:
        raise ValueError("must not hold a password: --tool-server-tokens takes what servers ask for")
    if not parts.path.strip("/"):
        url = parts._replace(path="/mcp").geturl()
    return label or re.sub(r"[^A-Za-z0-9_.-]", "-", parts.netloc)[:64], url
