"""Hooks of mkdocs (``mkdocs.yml``): pages from outside of docs/, and links to what the site does not hold.

The Markdown files are written to be read in the repository too, where a link may lead to any file. On the site, dated
results and the project's own pages are copied in; a link to anything else becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
RESULTS, EXAMPLES = "benchmarks/results", "examples/plugins"


def outside() -> dict[str, str]:
    """Pages that lie outside of docs/: path in the repository to path in the site."""
    found = {name: name for name in ROOT_PAGES}
    for folder in (RESULTS, EXAMPLES):
        paths = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / folder).rglob("*.md")))
        found |= {path: path for path in paths}
    return found


PATHS = outside()
SOURCES = {site: source for source, site in PATHS.items()}


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    for source, site in PATHS.items():
        in_nav = InclusionLevel.INCLUDED if source in ROOT_PAGES else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, site, abs_src_path=str(ROOT / source), inclusion=in_nav))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    uri = page.file.src_uri
    here = SOURCES.get(uri, f"docs/{uri}")  # where the page lies in the repository
    # Code is left as it is: fenced blocks, then spans.
    pieces = re.split(r"(^```.*?^```|`[^`\n]+`(?!\]))", markdown, flags=re.DOTALL | re.MULTILINE)
    pieces[::2] = [_with_links(piece, here, uri) for piece in pieces[::2]]
    return "".join(pieces)


def _with_links(text: str, here: str, uri: str) -> str:
    def rewritten(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        site = wanted.removeprefix("docs/") if wanted.startswith("docs/") else PATHS.get(wanted)
        if site is None:
            if not (ROOT / wanted).exists():
                return match[0]  # mkdocs reports it
            return words
        link = posixpath.relpath(site, posixpath.dirname(uri) or ".")
        return f"[{words}]({link}{'#' if anchor else ''}{anchor})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", rewritten, text)
