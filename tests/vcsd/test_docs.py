"""Code in the documentation runs as printed, and imports only public names.

partner of: vcsd/session.py, vcsd/loading.py
"""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import csd_spec
import kv_cache
import vcsd
from attention_engine import METHODS, load_methods

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
OURS = {path.parent.name for path in ROOT.glob("*/__init__.py")}


def strided(folder):
    """The documentation's example of a user-defined method, as a file."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "methods.md").read_text(), re.DOTALL)
    file = folder / "strided.py"
    file.write_text(code)
    return file


def test_example_method_of_docs_is_short_and_loads(tmp_path):
    file = strided(tmp_path)
    assert len(file.read_text().splitlines()) < 40
    assert set(load_methods(file)) == {*METHODS, "strided"}


def test_docs_describe_every_method():
    text = (DOCS / "methods.md").read_text()
    assert [name for name in METHODS if f"`{name}`" not in text] == []


def examples():
    return [code for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def names_of_ours(code):
    """Names that a piece of Python imports from the product's packages, as `package.name`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in OURS:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in OURS - {"vcsd"})
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vcsd":
            yield f"vcsd.{node.attr}"


def test_examples_use_only_public_names():
    used = {name for code in examples() for name in names_of_ours(code)}
    assert {"vcsd.attach", "vcsd.METHODS", "vcsd.DecodeStep"} <= used
    assert used <= {f"{face.__name__}.{name}" for face in (vcsd, kv_cache, csd_spec) for name in face.__all__}


def test_python_page_lists_public_names_and_no_others():
    text = (DOCS / "python.md").read_text()
    listed = text.partition("## Public names")[2].partition("A package may")[0]
    rows = [line.split("|")[1] for line in listed.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(vcsd.__all__)


def test_readme_results_have_command_and_worst_case():
    results = (ROOT / "README.md").read_text().partition("## Results")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in results.splitlines() if line.startswith("| ")]
    assert rows[0] == ["result", "value", "worst case", "command"]
    assert 1 < len(rows) <= 9  # the title, and at most eight results
    assert all(len(row) == 4 and row[2] not in ("", "-") and row[3].startswith("`vcsd ") for row in rows[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_readme_reaches_every_page():
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f"docs/{page.name}" not in text] == []


@pytest.mark.parametrize("name", vcsd.__all__)
def test_every_public_name_imports(name):
    assert getattr(vcsd, name) is not None


def test_package_has_types_and_version():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (ROOT / "vcsd" / "py.typed").is_file()
    assert "py.typed" in settings["tool"]["setuptools"]["package-data"]["vcsd"]
    assert vcsd.__version__ == settings["project"]["version"]


def test_modules_without_torch_import_without_it():
    needs = {
        "DriveReport",
        "Session",
        "Report",
        "RequestHandle",
        "RequestRejectedError",
        "SamplingParams",
        "Server",
        "UnsupportedModelError",
        "attach",
        "serve",
    }
    names = ", ".join(sorted(set(vcsd.__all__) - needs))
    code = f"import sys; sys.modules['torch'] = None; import kv_cache; from vcsd import {names}"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        vcsd.magic  # noqa: B018
