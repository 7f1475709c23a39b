"""Attention engine of a drive: the methods, their kernels and the clock model.

Kernels receive banks of pages and opaque slot numbers. They do not interpret slot numbers.
"""

from attention_engine.arithmetic import Arithmetic
from attention_engine.clock import EngineClock
from attention_engine.kernels import approximate, attend, exact
from attention_engine.merge import merge
from attention_engine.methods import METHODS, Methods, load_methods
from attention_engine.select import GroupScore, best_tokens, selected_mass, softmax_scores, top_channels
from attention_engine.step import AttentionMethod, Compute, DecodeStep, Memory, Queries, Read
from attention_engine.values import add_rows, all_finite, to_half, widen_inputs

__all__ = [
    "METHODS",
    "Arithmetic",
    "AttentionMethod",
    "Compute",
    "DecodeStep",
    "EngineClock",
    "GroupScore",
    "Memory",
    "Methods",
    "Queries",
    "Read",
    "add_rows",
    "all_finite",
    "approximate",
    "attend",
    "best_tokens",
    "exact",
    "load_methods",
    "merge",
    "selected_mass",
    "softmax_scores",
    "to_half",
    "top_channels",
    "widen_inputs",
]
