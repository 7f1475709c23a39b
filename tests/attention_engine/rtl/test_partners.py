"""Every RTL module has a test, and every tool can read it."""

import re

import pytest
from rtl_bench import HERE, SOURCES

MODULES = sorted(path.stem for path in SOURCES.glob("*.sv"))


@pytest.mark.parametrize("module", MODULES)
def test_every_rtl_module_has_a_test(module):
    partner = HERE / f"test_{module}.py"
    assert partner.exists(), f"{module}.sv: a test_{module}.py is missing"
    assert re.search(rf'simulate\(\s*"{module}"', partner.read_text()), f"{partner.name} does not simulate {module}"
    assert re.search(rf"^module {module}\b", (SOURCES / f"{module}.sv").read_text(), re.M)
