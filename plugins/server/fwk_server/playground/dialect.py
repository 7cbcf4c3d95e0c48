"""The routes of the pages' files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from fwk.interfaces.dialect import Dialect
from fwk_server._common.documented import HTML, Reply, documented
from fwk_server.playground import PlaygroundOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

KINDS = {".html": "html", ".js": "javascript", ".css": "css", ".txt": "plain"}
STATIC = Path(__file__).with_name("static")
FILES = {"/": "index.html", "/docs": "docs.html"} | {
    f"/playground/{name}": name
    for name in sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*"))
    if not name.endswith(".html")
}
"""What is served under each path: the pages, their parts, and libraries under ``vendor/`` with their licences."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Failure(Reply):
    """Every error."""

    error: dict[str, Any]


class PlaygroundDialect(Dialect):
    """Serves the files, read once."""

    public_paths = tuple(FILES)

    def routes(self, app: FastAPI) -> None:
        options = self.context.options
        if isinstance(options, PlaygroundOptions) and not options.playground:
            return
        for path, name in FILES.items():
            file = STATIC / name
            send = partial(_file, file.read_bytes(), f"text/{KINDS[file.suffix]}; charset=utf-8")
            app.add_api_route(path, send, methods=["HEAD"], include_in_schema=False)
            app.add_api_route(
                path,
                send,
                methods=["GET"],
                include_in_schema=path == "/",  # which has another method, in another dialect
                response_model=None,
                response_class=Response,
                responses=documented(None, Failure, works=False, stream=HTML),
            )


async def _file(data: bytes, kind: str, request: Request) -> Response:
    return Response(data, media_type=kind, headers=HEADERS)
