"""What the documentation shows works as it stands."""

import re
from pathlib import Path

from attention_engine import METHODS, load_methods

DOCS = Path(__file__).parents[2] / "docs"


def strided(folder):
    """The example of a method of one's own, as a file."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "methods.md").read_text(), re.DOTALL)
    file = folder / "strided.py"
    file.write_text(code)
    return file


def test_the_example_of_a_method_is_short_and_loads(tmp_path):
    file = strided(tmp_path)
    assert len(file.read_text().splitlines()) < 40
    assert set(load_methods(file)) == {*METHODS, "strided"}


def test_every_method_is_described():
    text = (DOCS / "methods.md").read_text()
    assert [name for name in METHODS if f"`{name}`" not in text] == []
