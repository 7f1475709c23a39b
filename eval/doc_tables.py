"""Tables of the documentation: their place in a page, and the CPU on which their figures were measured."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from vcsd_eval.sweep import cores

VECTORS = {"avx512f": "AVX-512", "avx512_vnni": "VNNI", "amx_tile": "AMX"}  # flags of /proc/cpuinfo


def with_table(page: str, name: str, text: str) -> str:
    """A page with the text of a table replaced; raises ValueError if the page has no place for it."""
    place = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?\n?(<!-- /table -->)", re.DOTALL)
    if len(place.findall(page)) != 1:
        raise ValueError(
            f"the page needs one line `<!-- table: {name} -->` and `<!-- /table -->` after it, around the table"
        )
    return place.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page)


def cpu_name() -> str:
    """Model of the CPU, its vector extensions, and the number of cores that this process may use."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    lines = dict(re.findall(r"^(model name|flags)\s*: (.*)$", info, re.MULTILINE))
    flags = lines.get("flags", "").split()
    vectors = [name for flag, name in VECTORS.items() if flag in flags] or ["AVX2"] * ("avx2" in flags)
    return ", ".join([lines.get("model name", platform.machine()), *vectors, f"{cores()} cores"])
