"""Constants of the model of OrbitFlow (VLDB 2026) that the paper does not print; its code (Heelim-Hong/ORBITFLOW) gives
some of them."""

from __future__ import annotations

from vcsd_eval.papers.paper import Constant

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
