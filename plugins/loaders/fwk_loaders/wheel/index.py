"""Fetch a wheel from a package index by its own API, for environments without pip (made by uv or pipx).

Indexes answer as JSON (PEP 691) or as a page of links (PEP 503); both are read. Which index is asked is what uv and pip
would ask: ``UV_DEFAULT_INDEX``, ``UV_INDEX_URL``, ``PIP_INDEX_URL``, pip's configuration files, else PyPI. Folders of
``UV_FIND_LINKS`` and ``PIP_FIND_LINKS`` come first, and ``PIP_NO_INDEX`` leaves nothing else.
"""

from __future__ import annotations

import configparser
import json
import os
import shutil
import ssl
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import httpx
from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from fwk_http.clients import Allowance, bound_httpx

PYPI = "https://pypi.org/simple"
VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
FIND_LINKS = ("UV_FIND_LINKS", "PIP_FIND_LINKS")
NO_INDEX = "PIP_NO_INDEX"
KINDS = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
MAX_PAGE_BYTES = 32 << 20
SLOWEST = 20_000.0
"""Bytes a second that a wheel must bring on average."""


class NoWheel(OSError):
    """The index has no such wheel, or no index answers. The message is a sentence."""


def index_url() -> str:
    """The package index of this user, without a slash at its end."""
    for name in VARIABLES:
        if os.environ.get(name):
            return _without_name(os.environ[name]).rstrip("/")
    for path in _configurations():
        config = configparser.ConfigParser(interpolation=None)
        try:
            config.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue
        for section in ("install", "download", "global"):
            if config.has_option(section, "index-url"):
                return config.get(section, "index-url").strip().rstrip("/")
    return PYPI


def _folders() -> Iterator[Path]:
    """Folders of wheels; addresses among them are left to pip and uv."""
    for name in FIND_LINKS:
        for entry in os.environ.get(name, "").replace(",", " ").split():
            found = urlsplit(entry)
            if found.scheme in ("", "file"):
                yield Path(unquote(found.path) if found.scheme else entry).expanduser()


def _has_no_index() -> bool:
    return os.environ.get(NO_INDEX, "").lower() not in ("", "0", "false", "no", "off", "n", "f")


def _without_name(value: str) -> str:
    """uv takes NAME=URL, too."""
    before, separator, after = value.partition("=")
    return after if separator and before.isidentifier() else value


def _configurations() -> Iterator[Path]:
    """pip's files, the strongest first."""
    if os.environ.get("PIP_CONFIG_FILE"):
        yield Path(os.environ["PIP_CONFIG_FILE"])
    yield Path(sys.prefix) / "pip.conf"
    yield Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pip" / "pip.conf"
    yield Path.home() / ".pip" / "pip.conf"
    yield Path("/etc/pip.conf")


def fetch_wheel(
    requirement: str, folder: Path, max_bytes: int, reached: Callable[[int, int], None], index: str | None = None
) -> Path:
    """Put the wheel of ``NAME==VERSION`` that fits this machine into ``folder``. Returns its path.

    reached: called with the bytes that came so far and those that are to come. Raises ``OSError`` with a sentence.
    """
    wanted = Requirement(requirement)
    for given in _folders():
        wheels = sorted(path.name for path in given.glob("*.whl"))
        name = _fitting(wanted, wheels)
        if name is not None:
            if (given / name).stat().st_size > max_bytes:
                raise NoWheel(f"{given / name} has more than {max_bytes} bytes, so it is not {requirement}")
            return Path(shutil.copy(given / name, folder))
    if _has_no_index():
        raise NoWheel(f"no folder of {' and '.join(FIND_LINKS)} has a wheel of {wanted}, and no index may be asked")
    index = index or index_url()
    page = f"{index}/{canonicalize_name(wanted.name)}/"
    try:
        with bound_httpx(_client(), _allowance(max_bytes), follows_redirects=True) as client:
            reply = client.get(page, headers={"accept": KINDS})
            reply.raise_for_status()
            url = _wheel(wanted, _links(str(reply.url), reply), _shown(index))
            path = folder / _file_name(url)
            with client.stream("GET", url) as stream, path.open("wb") as out:
                stream.raise_for_status()
                total = int(stream.headers.get("content-length") or max_bytes)
                for piece in stream.iter_bytes():
                    out.write(piece)
                    reached(out.tell(), max(total, 1))
    except httpx.HTTPStatusError as error:
        raise NoWheel(f"the package index {_shown(index)} answers {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NoWheel(f"the package index {_shown(index)} cannot be read: {error}") from None
    return path


def _client() -> httpx.Client:
    """With the certificates that pip and others are told of."""
    verify = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    context = ssl.create_default_context(cafile=verify) if verify else True
    return httpx.Client(follow_redirects=True, timeout=30, verify=context)


def _allowance(max_bytes: int) -> Callable[[httpx.Response], Allowance]:
    def allowed(reply: httpx.Response) -> Allowance:
        is_file = reply.request.url.path.endswith(".whl")
        return Allowance(max_bytes if is_file else MAX_PAGE_BYTES, bytes_per_second=SLOWEST)

    return allowed


def _links(base: str, reply: httpx.Response) -> list[str]:
    """The addresses of all files that the index lists."""
    if "json" in reply.headers.get("content-type", ""):
        files = json.loads(reply.content).get("files", [])
        return [urljoin(base, file["url"]) for file in files if isinstance(file, dict) and not file.get("yanked")]
    found = _Links()
    found.feed(reply.text)
    return [urljoin(base, link) for link in found.links]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _wheel(wanted: Requirement, links: list[str], index: str) -> str:
    """The address of the wheel that fits. Raises ``NoWheel``."""
    link = _fitting(wanted, links)
    if link is None:
        raise NoWheel(f"the package index {index} has no wheel of {wanted} for this machine")
    return urldefrag(link).url


def _fitting(wanted: Requirement, links: list[str]) -> str | None:
    fitting = frozenset(sys_tags())
    for link in links:
        try:
            name, version, _, tags = parse_wheel_filename(_file_name(link))
        except InvalidWheelFilename:
            continue
        if name == canonicalize_name(wanted.name) and wanted.specifier.contains(version) and tags & fitting:
            return link
    return None


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]


def _shown(url: str) -> str:
    """Without a user's name and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
