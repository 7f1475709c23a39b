"""A missing package of an extra is one error with the line that installs it."""

import sys
from types import SimpleNamespace

import pytest

from csd_spec.optional import MissingExtraError, is_installed, require


def test_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for package in ("no_such_package", "matplotlib"):
        with pytest.raises(MissingExtraError) as refused:
            require("--plot", "plot", "json", package)
        assert str(refused.value) == f"--plot needs the package {package}: pip install 'vcsd[plot]'"


def test_installed_packages_are_not_refused():
    assert is_installed("json")
    require("--plot", "plot", "json", "csv")


def test_module_that_stands_in_for_a_package_is_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "no_such_package", SimpleNamespace())
    assert is_installed("no_such_package")
