"""What TierKV prints (simulated, without authors or code), and the constants that it does not."""

from __future__ import annotations

from string import ascii_lowercase

from eval.papers.paper import Claim, Constant, Kind

I, C, P, X = Kind.INPUT, Kind.CALIBRATED, Kind.PREDICTED, Kind.CONTRADICTION  # noqa: E741
COMMAND = "vcsd eval claims --paper tierkv"
Row = tuple[str, float, Kind]  # what it is, what is printed, what it is to our model

BLOCK = "equation 2 with the model's layers and KV heads gives 1.6 times less"
TPOT = "the weights alone take longer to read from the GPU's memory"
ITERATION = "a token takes an iteration, and an iteration is said to take 20 ms (t4)"
COPY = "equation 1 gives 165 us, as section 3.5 says itself (t2)"
WASTED = "the simulator does not model it, as appendix E says"
ONE_LINK = "a link that carries every byte once gives (T + X) / max(T, X), which is never more than 2"
ORACLE = "7.74 / 1.20 is over Oracle; Prefetch has 3.10 in the same table"
MODELS = "table 3 has 2.93 for the first; bytes per computing, by equation 2, do not grow with the model"
EQUAL = "tables 3 and 5 have equal TTFT for all policies"
BURST = "a rate twice as high would be six times oversubscribed, and table 5 has stalls at four times"
LENGTHS = "requests of 512 + 256 tokens, which are part of the workload, lose so little that the largest block is best"


def _rows(name: str, source: str, unit: str, *rows: Row, reason: str = "", bound: str = "") -> list[Claim]:
    """A claim for each value, lettered unless it is the only one; reason: of contradictions."""
    letters = ascii_lowercase if len(rows) > 1 else [""]
    return [
        Claim(f"{name}{letter}", text, value, unit, source, kind, COMMAND, bound, reason if kind is X else "")
        for letter, (text, value, kind) in zip(letters, rows, strict=False)
    ]


def _one(name: str, text: str, value: float, unit: str, source: str, kind: Kind = P, reason: str = "") -> Claim:
    return Claim(name, text, value, unit, source, kind, COMMAND, reason=reason)


def _by_ratio(name: str, what: str, unit: str, values: dict[int, float], kind: Kind, source: str) -> list[Claim]:
    """A claim for each oversubscription, named after it."""
    return [_one(f"{name}-{ratio}", f"{what}, {ratio}x", value, unit, source, kind) for ratio, value in values.items()]


def _by_window(name: str, what: str, unit: str, values: dict[int, float], fitted: tuple[int, ...]) -> list[Claim]:
    """A claim for each window K."""
    return [
        _one(f"{name}-{K}", f"{what}, K = {K}", value, unit, "Table 6", C if K in fitted else P)
        for K, value in values.items()
    ]


MODELS_7B_UP = ("llama-3-8b", "llama-2-13b", "codellama-34b", "llama-3-70b")
WINDOWS = (0, 1, 2, 4, 6, 8, 10, 12, 16)
_HITS = dict(zip(WINDOWS, (0, 42.6, 76.1, *[100.0] * 6), strict=True))
_TPOTS = dict(zip(WINDOWS, (4.38, 3.19, 2.10, *[1.20] * 6), strict=True))
_LRU = {2: 2.57, 3: 4.35, 4: 6.25, 5: 7.74}
_FREQUENCY = {2: 2.59, 3: 4.36, 4: 6.25, 5: 7.75}

CLAIMS = (
    *_rows(
        "t1",
        "Table 2",
        "MiB",
        *[
            (f"a block, {model}", value, kind)
            for model, value, kind in zip(MODELS_7B_UP, (2.0, 12.5, 4.8, 8.0), (P, P, X, X), strict=True)
        ],
        reason=BLOCK,
    ),
    *_rows(
        "t2",
        "3.5",
        "us",
        ("2 MB from host memory", 45, P),
        ("2 MB from the SSD", 366, P),
        ("8 MB from host memory", 165, P),
        ("8 MB from the SSD", 1200, P),
    ),
    _one("t2e", "the GPU's memory over the SSD", 480, "x", "Abstract"),
    _one("t3a", "8 MB from host memory", 0.47, "ms", "4.6", X, COPY),
    _one("t3b", "80 ms over that", 170, "x", "4.6", X, COPY),
    *_rows("t4", "3.5, 4.6", "ms", ("an iteration, 7B, batch 32", 20, I), ("the same, 70B, batch 8", 80, I)),
    _one("t5-oracle", "TPOT, Oracle, and all at 1x", 1.20, "ms", "Table 5", C),
    *_by_ratio("t5", "TPOT, Prefetch", "ms", {2: 1.20, 3: 1.20}, C, "Table 5"),
    _one("t5-weights", "TPOT, 8B, beside reading the weights", 1.20, "ms", "Table 5", X, TPOT),
    _one("t5-iteration", "TPOT, 7B, beside an iteration", 1.20, "ms", "Table 5", X, ITERATION),
    *_by_ratio("t6", "TPOT, LRU and Static", "ms", _LRU, C, "Table 5"),
    *_by_ratio("t7", "TPOT, Frequency", "ms", _FREQUENCY, P, "Table 5"),
    *_by_ratio("t8", "TPOT, Prefetch", "ms", {4: 1.79, 5: 3.10}, C, "Table 5"),
    _one("t9", "tokens/s, Oracle, and all at 1x", 239_794, "1/s", "Table 5", C),
    *_by_ratio("t10", "tokens/s, LRU and Static", "1/s", {2: 130_927, 4: 59_628, 5: 46_158}, P, "Table 5"),
    *_by_ratio("t10", "tokens/s, LRU and Static", "1/s", {3: 81_921}, C, "Table 5"),
    *_by_ratio("t11", "tokens/s, Frequency", "1/s", {2: 128_763, 3: 81_453, 4: 59_663, 5: 46_091}, P, "Table 5"),
    *_by_ratio("t12", "tokens/s, Prefetch", "1/s", {4: 180_646, 5: 111_178}, P, "Table 5"),
    *_by_window("t13", "hits, 3x", "%", _HITS, ()),
    *_by_window("t14", "TPOT, 3x", "ms", _TPOTS, (0, 1, 2)),
    _one("t15", "bandwidth wasted, all K", 0, "%", "Table 6", X, WASTED),
    _one("t16a", "TPOT, LRU over Prefetch, 3x", 3.6, "x", "Abstract"),
    _one("t16b", "tokens/s, Prefetch over LRU, 3x", 2.9, "x", "Abstract"),
    _one("t16c", "TPOT, LRU over Prefetch, 3x, by overlap on a shared bus", 3.6, "x", "4, 4.1", X, ONE_LINK),
    _one("t17", "TPOT, LRU over Prefetch, 5x", 6.5, "x", "4.1", X, ORACLE),
    *_rows("t18", "Table 5", "ms", ("TTFT, all, mean", 8.0, I), ("TTFT, all, 95th percentile", 12.4, I)),
    *_rows(
        "t19",
        "Table 4",
        "x",
        *[(f"tokens/s over LRU, {m}", v, X) for m, v in zip(MODELS_7B_UP, (2.7, 3.0, 3.6, 4.2), strict=True)],
        reason=MODELS,
    ),
    *_rows(
        "t20",
        "Table 4",
        "x",
        *[
            (f"95th percentile of TTFT over LRU's, {m}", v, X)
            for m, v in zip(MODELS_7B_UP, (0.48, 0.42, 0.35, 0.24), strict=True)
        ],
        reason=EQUAL,
    ),
    _one("t21a", "TPOT of a request, LRU, 3x, median", 4.55, "ms", "4.2", I),
    _one("t21b", "the same, 95th percentile", 5.83, "ms", "4.2", I),
    _one("t21c", "requests over 5 ms a token", 28, "%", "4.2"),
    _one("t22a", "the SSD's use in a burst, twice 3x", 0, "%", "4.3"),
    _one("t22b", "hits in it, 3x", 100, "%", "4.3"),
    _one("t22c", "hits in it, twice 3x", 100, "%", "4.3", X, BURST),
    _one("t23", "DMA's efficiency, blocks of 4 tokens over 16", -24, "%", "4.5"),
    _one("t24a", "memory lost, blocks of 64 tokens", 31, "%", "4.5", C),
    _one("t24b", "the best block, tokens", 16, "x", "4.5"),
    _one("t24c", "the best block for 512 + 256 tokens", 16, "x", "4.5", X, LENGTHS),
    Claim("t25a", "hits in every pattern", 80, "%", "4.7", P, COMMAND, ">"),
    _one("t25b", "Wilcoxon's W, Prefetch against LRU", 0, "x", "Table 7"),
    _one("t25c", "pairs of requests", 10_000, "x", "Table 7", I),
    Claim("t25d", "TPOT, K = 0, from", 4.15, "ms", "4.4", P, COMMAND, ">"),
    Claim("t25e", "the same, to", 4.60, "ms", "4.4", P, COMMAND, "<"),
)
PRINTED = {claim.id: claim.value for claim in CLAIMS}

COMPUTE = Constant("compute_ms", 1.20, "ms", "an iteration that waits for nothing", "t5-oracle")
STEP_TOKENS = Constant("step_tokens", 288, "tokens", "that an iteration makes, at any oversubscription", "t9")
SPREAD = Constant(
    "spread",
    0.25,
    "of the mean",
    "standard deviation of what an iteration's copies take: their largest error is least",
    "t5-2, t5-3, t8-4, t8-5, t14-1, t14-2",
)
STALL_SHARE = Constant(
    "stall_share", 0.73, "of a stall", "that tokens/s feel: requests that do not stall go on", "t10-3"
)
COPIES = {
    ratio: Constant(f"copies_ms_{ratio}x", round(value - COMPUTE.value, 2), "ms", "an iteration's", f"t6-{ratio}")
    for ratio, value in _LRU.items()
}
SWEEP_COPIES = Constant(
    "copies_ms_sweep", round(_TPOTS[0] - COMPUTE.value, 2), "ms", "an iteration's in table 6", "t14-0"
)
MEAN_TOKENS = Constant("mean_tokens", 70, "tokens", "of a request, of whose last block half is empty", "t24a")
CALIBRATED = (COMPUTE, STEP_TOKENS, SPREAD, STALL_SHARE, *COPIES.values(), SWEEP_COPIES, MEAN_TOKENS)
WINDOW = Constant("window", 4, "iterations", "K where it is not said; the SSD's is twice that")
WEIGHTS = Constant("weights_bytes", 2, "bytes a parameter", "FP16; what they leave of 80 GB is for K and V")
UNIFORM = Constant("uniform_tokens", 512 + 256, "tokens", "of a request of the uniform workload, at its end")
ASSUMED = (WINDOW, WEIGHTS, UNIFORM)
