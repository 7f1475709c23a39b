"""vcsd: attention inside virtual computational storage drives.

with vcsd.attach(model, drives=2, attention="sparf", compression=8) as csd:
    out = model.generate(**inputs, max_new_tokens=64)
    print(csd.report())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcsd.attached import Attached, attach

__all__ = ["Attached", "attach"]


def __getattr__(name: str) -> Any:
    """Load torch and transformers only when they are needed: the command line answers without them."""
    if name in __all__:
        from vcsd import attached

        return getattr(attached, name)
    raise AttributeError(f"module 'vcsd' has no attribute {name!r}")
