"""Attention beside the flash: selection, kernels over pages where they lie, and the engine's clock.

Kernels see banks of pages and opaque slot numbers; what a slot number means is not known here.
"""

from attention_engine.clock import EngineClock
from attention_engine.kernels import add_rows, approximate, attend
from attention_engine.select import GroupScore, top_channels, top_tokens

__all__ = ["EngineClock", "GroupScore", "add_rows", "approximate", "attend", "top_channels", "top_tokens"]
