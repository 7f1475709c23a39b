"""The flash translation layer: K and V groups in modelled NAND, and the modelled time of reaching them.

It maps (sequence, layer, head, group) straight to a physical page: no file system and no block layer on top.
What the groups are used for is not known here.
"""

from ftl.errors import FtlError, NandRuleError, OutOfSpace, UnknownSequence
from ftl.kv import Ftl, KvView, PagePlan

__all__ = ["Ftl", "FtlError", "KvView", "NandRuleError", "OutOfSpace", "PagePlan", "UnknownSequence"]
