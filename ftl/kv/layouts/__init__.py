"""Layouts of K and V in flash, by the number that `SeqCreate` names them by. One small file each, one line here."""

from csd_spec import KvLayout
from ftl.kv.layouts.dual import BF16_ROWS, FP8_ROWS, FP16, INT4, INT4_BF16, INT8, INT8_BF16, LATENT_ROWS
from ftl.kv.layouts.group_map import GroupMap, PrimaryMap
from ftl.kv.layouts.layout import Layout
from ftl.kv.layouts.plain import OPAQUE_ROWS, PLAIN_ROWS
from ftl.kv.layouts.planes import PLANES

_CODED = INT8, INT4, INT8_BF16, INT4_BF16, *PLANES
_EVERY = FP16, BF16_ROWS, FP8_ROWS, *_CODED, PLAIN_ROWS, OPAQUE_ROWS, LATENT_ROWS
LAYOUTS: dict[int, Layout] = {layout.number: layout for layout in _EVERY}


def layout_of(form: KvLayout) -> Layout:
    """The layout that a form belongs to; copies of 8 and 4 bits of BF16 are forms of `bf16`."""
    return LAYOUTS[form.kind or form.bits]


__all__ = ["LAYOUTS", "GroupMap", "Layout", "PrimaryMap", "layout_of"]
