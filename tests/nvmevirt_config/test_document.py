"""YAML 1.2 scalars, duplicate keys, and documents that are written.

partner of: nvmevirt_config/document.py
"""

import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from csd_spec.checked import frozen_value
from nvmevirt_config.document import dump_yaml, load_yaml, read_yaml

ROOT = Path(__file__).parents[2]
SCALARS = {
    "1e9": 10**9,
    "285e6": 285_000_000,
    "1.5e-3": 0.0015,
    ".5": 0.5,
    "-.5": -0.5,
    "5.": 5.0,
    "1.0": 1.0,
    "012": 12,
    "0o17": 15,
    "0x1F": 31,
    "+7": 7,
    "1_000": "1_000",
    "1:30": "1:30",
    "190:20:30.15": "190:20:30.15",
    "0b11": "0b11",
    "on": "on",
    "off": "off",
    "yes": "yes",
    "No": "No",
    "y": "y",
    "true": True,
    "FALSE": False,
    "~": None,
    "null": None,
    "": None,
    "2024-05-10": "2024-05-10",
    "2024-05-10 00:00:00": "2024-05-10 00:00:00",
    ".inf": math.inf,
    "-.INF": -math.inf,
    "<<": "<<",
    "=": "=",
    "1e400": math.inf,
}

VALUES = st.one_of(
    st.text(max_size=8),
    st.sampled_from([*SCALARS]),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
)


@frozen_value
class Fields:
    count: int = 0
    rate: float = 0.0
    flag: bool = False
    name: str = ""


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalar_is_that_of_yaml_1_2(text, value):
    result = load_yaml(f"a: {text}")["a"]
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("flag: on", "flag: must be a valid boolean, got 'on' (a string)"),
        ("flag: yes", "flag: must be a valid boolean, got 'yes' (a string)"),
        ("count: 1_000", "count: must be a valid integer, got '1_000' (a string)"),
        ("count: 1.0", "count: must be a valid integer, got 1.0 (float)"),
        ("rate: 1:30", "rate: must be a valid number, got '1:30' (a string)"),
        ("name: 012", "name: must be a valid string, got 12 (int)"),
        ("name: ~", "name: must be a valid string, got None (NoneType)"),
        ("rate: .inf", "rate: must be a finite number"),
        ("<<: {count: 1}", "<<: no such field"),
        ("cuont: 1", "cuont: no such field: did you mean count?"),
        ("count: 1\nrate: 2\ncount: 3", "'count': a key is given twice"),
        ("? {a: 1}\n: 2", "found unhashable key"),
        ("a: &x 1\nb: *x", "aliases are not supported"),
    ],
)
def test_error_says_what_was_read(tmp_path, text, says):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)):
        read_yaml(tmp_path / "f.yaml", Fields)


def test_numbers_with_exponents_fit_integer_and_float_fields(tmp_path):
    (tmp_path / "f.yaml").write_text("count: 1e9\nrate: 1e9\nflag: TRUE\nname: on")
    assert read_yaml(tmp_path / "f.yaml", Fields) == Fields(count=10**9, rate=1e9, flag=True, name="on")


@given(st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3), max_leaves=5))
@pytest.mark.hypothesis
def test_written_document_is_read_back(value):
    assert load_yaml(dump_yaml({"a": value})) == {"a": value}


def test_no_other_file_reads_yaml_with_rules_of_its_own():
    folders = ("vcsd", "vcsd_cli", "eval", "nvmevirt_config", "csd_link", "csd_spec", "kv_cache", "fleet")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file.name != "document.py"]
    uses = re.compile(r"yaml\.(?:safe_load|load|safe_dump|dump|unsafe_load|full_load)\b")
    assert [file for file in files if uses.search(file.read_text())] == []
    assert yaml.safe_load("a: 1e9") == {"a": "1e9"}  # why
