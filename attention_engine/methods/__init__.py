"""Ways to attend, by name. A method is a function from a `Step` to the attention output, and one small file.

Methods of one's own are a Python file with a table METHODS of them, or entry points of the group `vcsd.methods`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attention_engine.methods.dense import dense
from attention_engine.methods.double_sparsity import double_sparsity
from attention_engine.methods.h2o import h2o
from attention_engine.methods.kivi import kivi
from attention_engine.methods.local import local
from attention_engine.methods.oracle import top_k_oracle
from attention_engine.methods.ours import paged, spending
from attention_engine.methods.progressive import progressive
from attention_engine.methods.quest import quest
from attention_engine.methods.sparf import sparf, sparf_apart, sparq
from attention_engine.methods.twilight import twilight
from attention_engine.select import GroupScore
from attention_engine.step import Method
from csd_spec.commands import METHOD_BYTES
from csd_spec.tables import Tables

Methods = Mapping[str, Method]

METHODS: dict[str, Method] = {
    "dense": dense,
    "sparf": sparf,
    "sparf-apart": sparf_apart,
    "sparq": sparq,
    "sparq-logits": partial(sparq, group_score=GroupScore.LOGITS),
    "local": local,
    "h2o": h2o,
    "quest": quest,
    "double-sparsity": double_sparsity,
    "twilight": twilight,
    "kivi": kivi,
    "kivi-2": partial(kivi, bits=2),
    "top-k-oracle": top_k_oracle,
    "spending": spending,
    "paged": paged,
    "paged-top-p": partial(paged, top_p=0.95),
    "progressive": progressive,
}


def _checked(source: str, name: object, method: Any) -> Method:
    """A method of somebody else's; raises ValueError for what no command could name, or call."""
    if not isinstance(name, str) or not name.isascii() or not name.isprintable() or not 0 < len(name) <= METHOD_BYTES:
        raise ValueError(f"{source}: method {name!r}: a name has 1 to {METHOD_BYTES} ASCII characters")
    if not callable(method):
        raise ValueError(f"{source}: method {name}: {method!r} is no function of a Step")
    checked: Method = method
    return checked


_TABLES = Tables(METHODS, "METHODS", "vcsd.methods", _checked, "docs/methods.md")


def load_methods(file: Path | None = None) -> Methods:
    """The methods of a drive: ours, those that are installed as plug-ins, and those of a file.

    The file is run; its global METHODS is its table, which may be ours (`from attention_engine import METHODS`) with
    its own added: ours itself stays as it is. Raises ValueError with the reason for a file or plug-in that fails.
    """
    return _TABLES.load(file)
