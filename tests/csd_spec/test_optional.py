"""A missing package of an extra is one error with the line that installs it."""

import sys

import pytest

from csd_spec.optional import MissingExtraError, importing, require


def test_required_packages_are_named_if_missing():
    require("--plot", "plot", "json", "csv")
    with pytest.raises(MissingExtraError) as refused:
        require("--plot", "plot", "json", "no_such_package")
    assert {"--plot", "no_such_package"} <= set(str(refused.value).replace(":", "").split())
    assert "pip install 'vcsd[plot]'" in str(refused.value)


def test_import_of_missing_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"vcsd\[plot\]"), importing("--plot", "plot"):
        import matplotlib  # noqa: F401
