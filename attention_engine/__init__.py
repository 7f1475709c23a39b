"""Attention beside the flash: methods, the kernels they are made of, and the engine's clock.

Kernels see banks of pages and opaque slot numbers; what a slot number means is not known here.
"""

from attention_engine.arithmetic import Arithmetic
from attention_engine.clock import EngineClock
from attention_engine.kernels import approximate, attend, exact
from attention_engine.methods import METHODS, Methods, load_methods
from attention_engine.parts import merge
from attention_engine.select import GroupScore, best_tokens, cover, top_channels, weigh
from attention_engine.step import Compute, Memory, Method, Queries, Read, Step
from attention_engine.values import add_rows, all_finite, take_in, to_half

__all__ = [
    "METHODS",
    "Arithmetic",
    "Compute",
    "EngineClock",
    "GroupScore",
    "Memory",
    "Method",
    "Methods",
    "Queries",
    "Read",
    "Step",
    "add_rows",
    "all_finite",
    "approximate",
    "attend",
    "best_tokens",
    "cover",
    "exact",
    "load_methods",
    "merge",
    "take_in",
    "to_half",
    "top_channels",
    "weigh",
]
