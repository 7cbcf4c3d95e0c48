"""Fail if the built site makes a browser fetch from another host: ``python -m docs.site_requests DIR``."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
HARMLESS_RELATIONS = {"canonical", "next", "prev"}


class _Requests(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(FETCHED.get(tag, "")) or ""
        if address.startswith(("http:", "https:", "//")) and given.get("rel") not in HARMLESS_RELATIONS:
            self.found.append(address)


def requests_of(page: str) -> list[str]:
    """Addresses of other hosts that a browser fetches to show the page."""
    parser = _Requests()
    parser.feed(page)
    return parser.found


def main(folder: Path) -> int:
    pages = sorted(folder.rglob("*.html"))
    if not pages:
        print(f"{folder}: no pages", file=sys.stderr)
        return 1
    found = {page: requests_of(page.read_text(encoding="utf-8")) for page in pages}
    for page, addresses in found.items():
        for address in addresses:
            print(f"{page}: fetches {address}", file=sys.stderr)
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
