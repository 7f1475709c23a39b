"""What OrbitFlow (VLDB 2026) prints, and what it does not; its code (Heelim-Hong/ORBITFLOW) fills some gaps."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from eval.papers.paper import Claim, Constant, Kind

I, C, P, X = Kind.INPUT, Kind.CALIBRATED, Kind.PREDICTED, Kind.CONTRADICTION  # noqa: E741
COMMAND = "vcsd eval claims --paper orbitflow"
Row = tuple[str, float] | tuple[str, float, Kind] | tuple[str, float, Kind, str]  # text, value, kind, reason


def _each(name: str, source: str, unit: str, *rows: Row, bound: str = "", after: str = "") -> list[Claim]:
    """A claim for each row, with letters behind the last that was used."""
    letters = ascii_lowercase[ascii_lowercase.index(after) + 1 if after else 0 :]
    made = []
    for letter, (text, value, *rest) in zip(letters, rows, strict=False):
        kind: Any = rest[0] if rest else P
        reason = str(rest[1]) if len(rest) > 1 else ""
        made.append(Claim(f"{name}{letter}", text, value, unit, source, kind, COMMAND, bound, reason))
    return made


_ALPHA = "o9 wants more than the text's alpha of 1 (column late = 2), o11 less (late = 0): no one fits both"
_TRACES = "it follows from traces that are not printed: contexts, bursts, lengths of another paper's"
_VERSIONS = "another version of the paper prints +62 and +66"

CLAIMS = (
    *_each(
        "o1",
        "3.3.2",
        "x",
        ("offload counts of 32 layers, D(32)", 9),
        ("placements of 4 requests", 6561),
        ("free placements of 4 requests", 3.4e38),
        ("orders of magnitude between them", 30, X, "its own two values are 34.7 orders apart"),
    ),
    *_each("o2", "5.4", "layers", ("offloaded at distance 4", 8), ("at distance 5", 6)),
    *_each(
        "o3",
        "Fig. 3",
        "blocks' time",
        ("step 1, A: 27 computing and 9 stalled", 36),
        ("step 1, B: no stall", 27),
        ("step 1, C: no stall", 27),
        ("step 16, A: 12 stalled", 39),
        ("step 16, C: 2 stalled", 29),
    ),
    *_each("o3", "Fig. 3", "blocks", ("step 16, B on the GPU", 78), after="e"),
    *_each(
        "o4",
        "2.2",
        "x",
        ("transfer over compute of a layer, A6000, 2K", 1.9, X, "the lines fitted in its code give 1.16"),
        ("the same, 16K", 6.1),
    ),
    *_each("o5", "Fig. 2c", "ms", ("objective in the example", 52, I)),
    *_each("o5", "Fig. 2c", "K tokens", ("where its margin ends", 9, I), after="a"),
    *_each("o6", "5.1", "K tokens", ("that 2 GB hold", 16), ("of a batch, at most", 32, I)),
    *_each(
        "o7",
        "5.1",
        "K tokens",
        ("sequences up to", 400, X, "the model's length is 32,384 in its code, its traces' longest request 11,785"),
    ),
    *_each("o8", "abstract", "points", ("TPOT attainment, up to", 66, X, _VERSIONS), ("TBT", 48, X, _VERSIONS)),
    *_each(
        "o9",
        "abstract, 5.2",
        "%",
        ("less P95 TBT", 38, X, "its section 5.2 prints 21.7 to 68.6"),
        ("scale 1: than FlexGen", 21.7, X, _ALPHA),
        ("scale 1: than DeepSpeed", 68.6, X, _ALPHA),
    ),
    *_each(
        "o10",
        "5.2",
        "%",
        ("scale 1.5: less P99 TBT than DeepSpeed", 65),
        ("less P99 TPOT than DeepSpeed", 64),
        ("less P99 TBT or TPOT than others, least", 3),
        ("the same, most", 9),
    ),
    *_each(
        "o11",
        "5.2",
        "%",
        ("more end-to-end than all but DeepSpeed, least", 12, X, _ALPHA),
        ("the same, most", 21, X, _ALPHA),
    ),
    *_each("o12", "5.2", "x", ("requests a minute over DeepSpeed", 3.3)),
    *_each(
        "o12",
        "5.2",
        "%",
        ("over others, least", 4),
        ("over others, most", 52),
        after="a",
    ),
    *_each("o13", "5.2", "%", ("TBT attained, scale 1, high rate", 75), bound=">"),
    *_each("o13", "5.2", "%", ("TBT attained by baselines, scale 2.5, high rate", 50), after="a"),
    *_each(
        "o14",
        "5.3",
        "%",
        ("TBT attained, 128K: FlexGen+", 69.2, X, _TRACES),
        ("heuristic", 32.9, X, _TRACES),
        ("OrbitFlow", 85, X, _TRACES),
    ),
    *_each("o15", "5.3", "%", ("TBT attained while CV grows", 90, X, _TRACES)),
    *_each(
        "o16",
        "5.3",
        "%",
        ("less mean TTFT by SRTF", 40, X, _TRACES),
        ("less P95 TTFT", 24, X, _TRACES),
        ("TPOT attained", 92.4, X, _TRACES),
        ("more P95 TPOT", 29, X, _TRACES),
        ("less throughput", 8, X, _TRACES),
    ),
    *_each(
        "o17",
        "Fig. 14a",
        "%",
        ("TBT attained, scale 1: uniform", 45.1, C),
        ("+ request-wise", 54.5, X, "at scale 1 a step is late by computing alone, whatever lies where"),
        ("+ pause", 71),
        ("+ deposit", 85.6),
    ),
    *_each(
        "o18",
        "Fig. 14b",
        "points",
        ("by deposit, scale 2.5: FlexGen+", 18),
        ("heuristic", 11),
        ("OrbitFlow", 5),
        ("by deposit, scale 1: heuristic", 35),
        ("OrbitFlow", 20),
    ),
    *_each(
        "o19",
        "Table 1",
        "calls a request",
        ("both static", 1.25, X, _TRACES),
        ("token dynamic", 11.92, X, _TRACES),
        ("both dynamic", 48.33),
    ),
    *_each(
        "o20",
        "Table 1",
        "%",
        ("solver of decode: both static", 0.27, I),
        ("token dynamic", 0.37, I),
        ("both dynamic", 0.64, I),
        ("solver of a step: both static", 23.47, I),
        ("token dynamic", 31.65, I),
        ("both dynamic", 28.49, I),
    ),
    *_each(
        "o21",
        "5.4",
        "%",
        ("scheduler", 5.28, I),
        ("prefill", 7.04, I),
        ("decode", 87.23, I),
        ("KV manager", 0.45, I),
        ("planner", 0.02, X, "Table 1 prints 0.27 to 0.64 % of decode"),
    ),
    *_each(
        "o22",
        "Fig. 15",
        "%",
        ("of placements, free ones the same", 56, X, "the three shares add up to 97.6 %"),
        ("equal in time", 24.9, X, "the three shares add up to 97.6 %"),
        ("better", 16.7, X, "the three shares add up to 97.6 %"),
    ),
    *_each(
        "o23",
        "5.1",
        "requests/min",
        ("in all studies", 0.97, X, "arrivals are counted in engine steps in its code: a slow system gets fewer"),
    ),
)

LATE = 1.0  # late tokens a step before a request pauses: alpha in section 3.3.1
LOAD = Constant("load", 2.75, "x", "of the studies of section 5.4: the paper has one rate for all, in seconds", "o17a")
CALIBRATED = (LOAD,)
GAP = Constant("gap", 3000, "engine steps", "between requests at load 1; the two public traces have 3,630 and 2,010")
ASSUMED = (
    GAP,
    Constant("high load", 5, "x", "of all other rows: the higher one of the public traces"),
    Constant("prefill", 6000, "tokens/s", "an 8B model on an A5000; decoding stops meanwhile"),
    Constant("lengths", 12000, "tokens", "input and output are 96 to 144 x 2^0 to 2^6 in its code, the longest 11,785"),
    Constant("window", 128, "steps", "the longest that a plan holds: 32, 64, 96 or 128 in its newer solver"),
)
