"""The attention engine as synthesizable SystemVerilog, with its tables and its bit-exact models in Python."""

from pathlib import Path

SOURCES = Path(__file__).parent
