"""Sizes of a block that only `./dev test --long` and `./dev rtl` simulate."""

from pathlib import Path

import pytest

from tests.conftest import function_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the sizes of a block as long, but for one: each takes a build of its own.

    That one is of Icarus where there is one, which knows undefined values.
    """
    own = [item for item in items if item.path.parent == Path(__file__).parent and item.get_closest_marker("rtl")]
    chosen: dict[str, pytest.Item] = {}
    for item in own:
        if not item.get_closest_marker("long"):
            before = chosen.get(function_of(item.nodeid))
            if before is None or _simulator(before) != "icarus":
                chosen[function_of(item.nodeid)] = item
    for item in own:
        if item is not chosen.get(function_of(item.nodeid)):
            item.add_marker(pytest.mark.long)


def _simulator(item: pytest.Item) -> str:
    return str(item.callspec.params.get("simulator", "")) if hasattr(item, "callspec") else ""
