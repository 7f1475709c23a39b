"""Layouts: what a drive stores of K and V. `table.py` has all of them, `layout.py` what a layout is."""

from csd_spec.layouts.layout import Group, Layout, PageForm
from csd_spec.layouts.table import LAYOUTS, layout_named, layout_of, layouts, load_layouts, name_of, resolve

__all__ = [
    "LAYOUTS",
    "Group",
    "Layout",
    "PageForm",
    "layout_named",
    "layout_of",
    "layouts",
    "load_layouts",
    "name_of",
    "resolve",
]
