"""Synthesizable SystemVerilog of the attention engine, with its tables and bit-exact Python models."""

from pathlib import Path

SOURCES = Path(__file__).parent
