"""Attention methods by name. A method is a function from a `Step` to the attention output; each has one small file.

To add methods, write a Python file with a table METHODS, or define entry points of the group `vcsd.methods`.
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
from attention_engine.step import AttentionMethod
from csd_spec.commands import METHOD_BYTES
from csd_spec.tables import Tables

Methods = Mapping[str, AttentionMethod]

METHODS: dict[str, AttentionMethod] = {
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
"""Built-in attention methods, by name."""


def _checked(source: str, name: object, method: Any) -> AttentionMethod:
    """Return a method from outside this package; raises ValueError if its name or type is invalid."""
    if not isinstance(name, str) or not name.isascii() or not name.isprintable() or not 0 < len(name) <= METHOD_BYTES:
        raise ValueError(f"{source}: method {name!r}: a name has 1 to {METHOD_BYTES} ASCII characters")
    if not callable(method):
        raise ValueError(f"{source}: method {name}: {method!r} is not a function of a DecodeStep")
    checked: AttentionMethod = method
    return checked


_TABLES = Tables(METHODS, "METHODS", "vcsd.methods", _checked, "docs/methods.md")


def load_methods(file: Path | None = None) -> Methods:
    """Return the methods of a drive: built-in methods, installed plug-ins, and the methods of a file.

    The file is executed. Its global METHODS is its table; it may extend a copy of the built-in table (`from
    attention_engine import METHODS`), which is not modified. Raises ValueError with the reason if a file or plug-in is
    invalid.
    """
    return _TABLES.load(file)
