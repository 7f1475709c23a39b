"""Sizes of a block that only `./dev test --long` and `./dev rtl` simulate."""

from pathlib import Path

import pytest

from tests.conftest import function_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the sizes of a block as long, but for the last of each simulator: each takes a build of its own."""
    seen = set()
    for item in reversed(items):
        if item.path.parent != Path(__file__).parent or not item.get_closest_marker("rtl"):
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        block = function_of(item.nodeid), parameters.get("simulator")
        if block in seen:
            item.add_marker(pytest.mark.long)
        seen.add(block)
