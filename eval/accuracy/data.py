"""Published data files, found by their usual names in the folder that the environment variable VCSD_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "VCSD_DATA"
NAMES: dict[str, tuple[str, ...]] = {
    "wikitext": ("wikitext-2-raw-test.txt", "wiki.test.raw"),
    "squad": ("squad_dev_subset_xquad_en.json", "dev-v1.1.json"),
    "sharegpt": ("sharegpt_sample.json", "ShareGPT_V3_unfiltered_cleaned_split.json"),
    "triviaqa": ("triviaqa_sample.json", "web-dev.json"),
    "orbitflow": ("orbitflow_traces.json",),
    "shakespeare": ("tinyshakespeare.txt",),
    "mooncake": ("mooncake_conversation.jsonl", "conversation_trace.jsonl"),
}


def find(kind: str) -> Path | None:
    """Data file of a kind.

    Args:
        kind: A key of `NAMES`.

    Returns:
        The first file with a usual name in the folder; None without the variable or such a file.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    return next((path for name in NAMES[kind] if (path := Path(folder) / name).is_file()), None)


def needs_file(file: Path | None, kind: str, content: str) -> Path:
    """The file that a task cannot do without; raises ValueError that names its content and both ways to give one."""
    if file is None:
        names = " or ".join(NAMES[kind])
        raise ValueError(f"--data is needed: {content}; or name a folder by {VARIABLE} that has {names}")
    return file
