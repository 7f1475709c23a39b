"""Hooks of MkDocs: pages from files outside docs/, tables made at build time, and links that work in both places."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from site_pages import MADE, report  # noqa: E402 (found by the line above)

# Pages of the site that are files of the repository elsewhere
PAGES = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "checkpoint.md": "vcsd/shipped/checkpoint/README.md",
}
REPORT = "papers/report/index.html"
OTHER_FILES = "files"  # folder of the site for linked files that are not pages

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"[-*] +|\d+\. +")
_MARK = re.compile(r"^<!-- made: (\S+) -->$", re.MULTILINE)


def place(uri: str) -> str:
    """The path of a page of the site in the repository."""
    return PAGES.get(uri, f"docs/{uri}")


def uri_of(path: str) -> str:
    """The path in the site of a file of the repository."""
    pages = {source: uri for uri, source in PAGES.items()}
    if path in pages:
        return pages[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OTHER_FILES}/{path}"


def outside_fences(text: str) -> list[tuple[int, int]]:
    """Ranges of a page that are not blocks of code."""
    ranges, begin = [], 0
    for fence in _FENCE.finditer(text):
        ranges.append((begin, fence.start()))
        begin = fence.end()
    return [*ranges, (begin, len(text))]


def links(text: str) -> set[str]:
    """Links of a page to files."""
    return {link for begin, end in outside_fences(text) for link in _LINK.findall(text[begin:end])}


def with_site_links(text: str, uri: str) -> str:
    """A page whose links to files of the repository lead to the same files in the site."""
    folder = posixpath.dirname(place(uri))

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        return posixpath.relpath(uri_of(path), posixpath.dirname(uri) or ".")

    parts, last = [], 0
    for begin, end in outside_fences(text):
        parts += [text[last:begin], _LINK.sub(moved, text[begin:end])]
        last = end
    return "".join([*parts, text[last:]])


def with_wide_lists(text: str) -> str:
    """A page whose list items indent their content by 4, as Python-Markdown requires, not by the width of a mark."""
    lines: list[str] = []
    indents: list[int] = []  # of the content of open items, outermost first
    is_code = is_loose = False
    shift = 0
    for line in text.splitlines():
        content = line.lstrip()
        indent = len(line) - len(content)
        mark = None if is_code else _ITEM.match(content)
        while content and not is_code and indents and indent < indents[-1]:
            indents.pop()
        if content and indents:
            is_loose |= not lines[-1]
            if not is_code:
                inner = indent - indents[-1] if indent > 4 * len(indents) else 0
                shift = 4 * len(indents) + inner - indent
        elif content and not is_code:
            shift, is_loose = 0, is_loose and mark is not None
        if mark and is_loose and lines[-1]:
            lines.append("")
        lines.append(" " * (indent + shift) + content if content else "")
        is_code ^= content.startswith("```")
        if mark:
            indents.append(indent + len(mark[0]))
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add pages from elsewhere, the files to which pages link, and the papers' report."""
    if report(ROOT).is_file():
        files.append(File.generated(config, REPORT, content=report(ROOT).read_bytes()))
    for uri, source in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        folder = posixpath.dirname(place(page.src_uri))
        for path in sorted({posixpath.normpath(posixpath.join(folder, link)) for link in links(page.content_string)}):
            uri = uri_of(path)
            if uri.startswith(f"{OTHER_FILES}/") and not files.get_file_from_path(uri) and (ROOT / path).is_file():
                content = (ROOT / path).read_bytes()
                files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page to files of the site, and insert the tables that are made."""
    text = with_wide_lists(with_site_links(markdown, page.file.src_uri))
    return _MARK.sub(lambda match: MADE[match[1]](ROOT), text)
