"""The site: its pages, the Python names in its reference, its first commands, and a strict build.

partner of: vcsd/__init__.py, kv_cache/__init__.py
"""

import hashlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import kv_cache
import vcsd
from csd_spec import Status
from tests.vcsd_cli.test_main import vcsd as run_vcsd
from vcsd_cli.main import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OWN = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
FIRST = (DOCS / "getting-started.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", FIRST, re.DOTALL) for line in block.splitlines()]
MISSING = "the extra `docs` is missing: ./dev setup installs it"
LONGEST_BUILD_S = 300  # wall-clock, on a machine that others use


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without importing what its tags name."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def settings():
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def pages_of(nav):
    """Pages of a navigation tree, in order."""
    for each in nav:
        for target in [each] if isinstance(each, str) else each.values():
            if isinstance(target, str):
                yield target
            else:
                yield from pages_of(target)


def module_of_site(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"_site/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site_pages():
    """The module that makes tables of the site."""
    return module_of_site("site_pages")


@pytest.fixture(scope="module")
def hooks():
    """The hooks of MkDocs."""
    pytest.importorskip("mkdocs", reason=MISSING)
    return module_of_site("hooks")


def pages_elsewhere():
    """Pages of the site that are files outside of docs/, as its hooks list them."""
    text = (DOCS / "_site/hooks.py").read_text().partition("PAGES = {")[2].partition("}")[0]
    return dict(re.findall(r'"(\S+)": "(\S+)"', text))


def test_nav_lists_each_page_once():
    assert all((ROOT / path).is_file() for path in pages_elsewhere().values())
    assert Counter(pages_of(settings()["nav"])) == Counter([*OWN, *pages_elsewhere()])


def test_nav_titles_differ_in_section():
    def check(nav):
        sections = [each for each in nav if not isinstance(each, str)]
        titles = [title for section in sections for title in section]
        assert len(set(titles)) == len(titles), titles
        for section in sections:
            for target in section.values():
                if not isinstance(target, str):
                    check(target)

    check(settings()["nav"])


@pytest.mark.parametrize(
    "page", [page for page in OWN if page.startswith(("concepts/", "how-to/", "papers/", "getting"))]
)
def test_page_begins_with_what_reader_can_do(page):
    assert re.match(r"# .+\n\nAfter this page you ", (DOCS / page).read_text())


@pytest.mark.parametrize("page", [page for page in OWN if page.startswith("concepts/")])
def test_concept_has_picture_and_is_short(page):
    text = (DOCS / page).read_text()
    pictures = re.findall(r"^!\[.{10,}\]\((\.\./diagrams/.+\.svg)\)$", text, re.MULTILINE)
    assert pictures and all((DOCS / "concepts" / picture).is_file() for picture in pictures)
    assert 30 <= len(text.splitlines()) <= 80


@pytest.mark.parametrize("source", sorted(DOCS.glob("diagrams/*.mmd")), ids=lambda path: path.stem)
def test_diagram_is_a_picture_without_scripts_or_other_hosts(source):
    picture = source.with_suffix(".svg").read_text()
    ElementTree.fromstring(picture)
    assert not re.search(r"<script|foreignObject|@import|(?:href|src)=\"(?!#)|url\((?!#)", picture)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert digest in picture, "python docs/diagrams/render.py draws it again"
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    assert any(f"diagrams/{source.stem}.svg" in page.read_text() for page in pages), "no page shows it"


def test_no_page_has_the_source_of_a_diagram():
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *DOCS.rglob("*.md")]
    assert [page for page in pages if "```mermaid" in page.read_text()] == []
    assert not re.search(r"mermaid|unpkg|extra_javascript", (ROOT / "mkdocs.yml").read_text())


def test_reference_has_each_public_name_once():
    listed = [name for page in DOCS.glob("api/*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    public = [f"{face.__name__}.{name}" for face in (vcsd, kv_cache) for name in face.__all__]
    assert Counter(listed) == Counter(public)


def test_command_page_lists_every_option(site_pages):
    text = site_pages.commands(ROOT)
    for words, command in site_pages.app.leaf_commands():
        section = text.partition(f"### vcsd {' '.join(words)}\n")[2].partition("\n### ")[0]
        assert [
            name
            for param in command.params
            for name in param.opts
            if f"`{name}" not in section and name != "--help" and name.startswith("-") and not param.hidden
        ] == [], words


def test_configuration_page_has_meaning_of_each_field(site_pages):
    drive, served = site_pages.drive(ROOT), site_pages.serve_file(ROOT)
    assert "| `read_ns` | integer | 1,000 to 10,000,000 | required | tR, page to register, ns. |" in drive
    assert "| `restart` | boolean |  | `true` | Whether killed drives are restarted. |" in served
    assert [line for line in (drive + served).splitlines() if line.startswith("| `") and line.endswith("|  |")] == []


def test_error_page_has_every_status_and_exception():
    text = (DOCS / "reference/errors.md").read_text()
    assert re.findall(r"^\| (\w+)h \| `(\w+)` \|", text, re.MULTILINE) == [(f"{s:03X}", s.name) for s in Status]
    names = [f"{face.__name__}.{name}" for face in (vcsd, kv_cache) for name in face.__all__ if name.endswith("Error")]
    assert sorted(re.findall(r"^\| \[`(\S+)`\]", text, re.MULTILINE)) == sorted(names)


def test_first_commands_are_those_of_dev():
    (demo,) = re.findall(r"^\./dev (\w+)", FIRST, re.MULTILINE)
    assert f"  {demo}) setup_base; .venv/bin/vcsd run " in (ROOT / "dev").read_text()


@pytest.mark.parametrize("line", COMMANDS)
def test_first_command_runs(capsys, monkeypatch, line):
    program, *words = shlex.split(line)
    code, out, err = run_vcsd(capsys, monkeypatch, *words)
    assert (program, code) == ("vcsd", 0), err
    if line == COMMANDS[0]:
        steps = r"^\| decode step, `(\w+)`, simulated; error of its output \| ([\d,.]+) us; ([\d.]+) \| One decode step"
        figures = re.findall(steps, FIRST, re.M)
        assert len(figures) == 4
        step = out.partition("One decode step at ")[2].partition("output error: ")[0]
        shown = {words[0]: words[1:] for words in map(str.split, step.splitlines()) if len(words) > 1}
        for method, time, error in figures:
            assert time in shown[method] and shown[method][-1] == error
        for figure, value in re.findall(r"^\| (link.+?) \| (.+?) \| Traffic", FIRST, re.M):
            assert re.search(rf"{re.escape(figure)}\s+{re.escape(value)}\s", out), figure


def test_first_program_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", FIRST, re.DOTALL)
    assert len(re.findall(r"^(?:with vcsd.attach| {4})", code, re.M)) == 3
    (tmp_path / "first.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "first.py")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "link, a step" in done.stdout


def test_strict_build_succeeds_without_other_hosts(tmp_path):
    pytest.importorskip("material", reason=MISSING)
    pytest.importorskip("mkdocstrings_handlers.python", reason=MISSING)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST_BUILD_S,
    )
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) >= len(OWN) + len(pages_elsewhere())
    for name, text in pages.items():
        assert not re.search(r"<(?:script|link|img)[^>]* (?:src|href)=\"?https?://", text), name
        assert not re.search(r"class=\"?mermaid|(?:flowchart|graph) (?:LR|TB|TD)\b|sequenceDiagram", text), name
        for picture in re.findall(r'<img[^>]* src="([^":?#]+)"', text):
            assert (tmp_path / name).parent.joinpath(picture).is_file(), (name, picture)
    assert "--compression" in pages["reference/cli/index.html"]
    assert "read_ns" in pages["reference/configuration/index.html"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("- a\n  b\n- c\n", "- a\n    b\n- c\n"),
        ("- a\n\n  | t |\n\n  b\n- c\n\nd\n", "- a\n\n    | t |\n\n    b\n\n- c\n\nd\n"),
        (
            "1. a\n\n   b\n\n    ```\n    x:\n      - y\n    ```\n",
            "1. a\n\n    b\n\n    ```\n    x:\n      - y\n    ```\n",
        ),
        ("```\n- a\n  b\n```\n", "```\n- a\n  b\n```\n"),
    ],
    ids=["paragraph", "table", "fence", "code"],
)
def test_list_items_indent_content_by_four(hooks, given, expected):
    assert hooks.with_wide_lists(given) == expected


@pytest.mark.parametrize(
    ("uri", "given", "expected"),
    [
        ("style.md", "[g](../ARCHITECTURE.md#tiers)", "[g](architecture.md#tiers)"),
        ("concepts/drive.md", "[t](../../ARCHITECTURE.md#time)", "[t](../architecture.md#time)"),
        ("index.md", "[p](docs/python.md), [w](https://example.org)", "[p](python.md), [w](https://example.org)"),
        ("policies.md", "[e](../examples/policy_30_lines.py)", "[e](files/examples/policy_30_lines.py)"),
        ("models.md", "[c](../vcsd/shipped/checkpoint/README.md)", "[c](checkpoint.md)"),
        ("run.md", "```\n[x](../README.md)\n```", "```\n[x](../README.md)\n```"),
    ],
)
def test_links_out_of_docs_lead_to_pages_of_site(hooks, uri, given, expected):
    assert hooks.with_site_links(given, uri) == expected


def commands_in(text):
    """Words of each command of vcsd in a page, in blocks of code and in sentences."""
    for code in re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", text, re.DOTALL):
        for line in "".join(code).replace("\\\n", " ").splitlines():
            for part in re.split(r";|&&|\|| #", line):
                words = part.strip().removeprefix("$ ").split()
                if words[:1] == ["vcsd"] and len(words) > 1:
                    yield words[1:]


@pytest.mark.parametrize("page", OWN)
def test_page_has_commands_that_exist(page):
    leaves = dict(app.leaf_commands())
    for words in commands_in((DOCS / page).read_text()):
        command = leaves.get((words[0],)) or leaves.get(tuple(words[:2]))
        if command is None:  # a group of commands, as a name in a sentence
            assert words[0] in {leaf[0] for leaf in leaves} | {"COMMAND"} or words[0].startswith("--"), words
            continue
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
        asked = {word.partition("=")[0].rstrip(",)") for word in words if re.match(r"--[a-z]", word)}
        assert asked <= known, (words, asked - known)
