"""KV layouts: storage formats of keys and values in a drive. `table.py` lists them, `layout.py` defines the classes."""

from csd_spec.layouts.layout import Group, KvLayout, PageFormat
from csd_spec.layouts.table import LAYOUTS, layout_named, layout_of, layouts, load_layouts, resolve

__all__ = [
    "LAYOUTS",
    "Group",
    "KvLayout",
    "PageFormat",
    "layout_named",
    "layout_of",
    "layouts",
    "load_layouts",
    "resolve",
]
