"""Table of 2^x for `exp2_unit`, and the generator of the RTL include file."""

from __future__ import annotations

from attention_engine.rtl import SOURCES

SEGMENTS = 256
FILE = SOURCES / "exp2_table.svh"


def exp2_table() -> list[tuple[int, int]]:
    """Return (base, slope) of each segment of 2^x - 1 for x in [0, 1), in units of 2^-23; slope is for a full segment.

    A line is the chord of its segment, lowered by half of the distance between the chord and the curve at the midpoint.
    """
    entries = []
    for i in range(SEGMENTS):
        low, middle, high = (2 ** ((i + part) / SEGMENTS) for part in (0, 0.5, 1))
        sag = (low + high) / 2 - middle
        entries.append((max(0, round((low - 1 - sag / 2) * 2**23)), round((high - low) * 2**23)))
    return entries


def verilog() -> str:
    """Return the table as a function that all tools convert to a memory."""
    lines = [
        "// Written by `python -m attention_engine.rtl.tables`: {base, slope} of 256 segments of 2^x - 1, in 2^-23",
        "function automatic logic [38:0] exp2_entry(input logic [7:0] segment);",
        "  case (segment)",
        *(f"    8'd{i}: exp2_entry = {{23'd{b}, 16'd{s}}};" for i, (b, s) in enumerate(exp2_table())),
        "    default: exp2_entry = 39'd0;",
        "  endcase",
        "endfunction",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(verilog())
