"""What Dual-Blade (arXiv 2604.26557) prints, and the constants that it does not: its figures have no data, so these are
the numbers of its text and tables."""

from __future__ import annotations

from string import ascii_lowercase

from eval.papers.paper import Claim, Constant, Kind

I, C, P, X = Kind.INPUT, Kind.CALIBRATED, Kind.PREDICTED, Kind.CONTRADICTION  # noqa: E741
COMMAND = "vcsd eval claims --paper dual-blade"
SSDS = ("A", "B")  # Samsung PM9D3a and 990 PRO
ALPHAS = (0.3, 0.5, 0.7)
Value = tuple[str, float]  # what it is, and what is printed


def _each(
    name: str, source: str, unit: str, kind: Kind, *values: Value, reason: str = "", after: str = ""
) -> list[Claim]:
    """A claim for each value, with letters behind the last that was used."""
    letters = ascii_lowercase[ascii_lowercase.index(after) + 1 if after else 0 :]
    return [
        Claim(f"{name}{letter}", text, value, unit, source, kind, COMMAND, reason=reason)
        for letter, (text, value) in zip(letters, values, strict=False)
    ]


def _one(name: str, text: str, value: float, unit: str, source: str, kind: Kind = P, reason: str = "") -> Claim:
    return Claim(name, text, value, unit, source, kind, COMMAND, reason=reason)


def _latencies(name: str, who: str, means: Kind, values: list[tuple[float, float]]) -> list[Claim]:
    """A row of Table IV: mean and 99th percentile of three kinds of I/O."""
    made = []
    for number, (what, (mean, tail)) in enumerate(
        zip(("prefill write", "decode read", "decode write"), values, strict=True)
    ):
        letters = ascii_lowercase[2 * number : 2 * number + 2]
        made.append(_one(f"{name}{letters[0]}", f"{who}, {what}, mean", mean, "ms", "Table IV", means))
        made.append(_one(f"{name}{letters[1]}", f"{who}, {what}, 99th percentile", tail, "ms", "Table IV", I))
    return made


def _requests(name: str, what: str, values: list[tuple[float, float]]) -> list[Claim]:
    """Half of Table I: mean and 99.99th percentile of three paths."""
    made = []
    for number, (path, (mean, tail)) in enumerate(zip(("ext4", "io_uring_cmd", "SPDK"), values, strict=True)):
        a, b = list(ascii_lowercase[2 * number : 2 * number + 2])
        text = f"128 KiB {what}, depth 32, SSD A, {path}"
        made.append(_one(f"{name}{a}", f"{text}: mean", mean, "us", "Table I", I))
        made.append(_one(f"{name}{b}", f"{text}: 99.99th percentile", tail, "ms", "Table I", I))
    return made


def _decodes(name: str, ssd: str, without: list[float], pipelined: list[float]) -> list[Claim]:
    """An SSD's rows of Table V."""
    rows = [
        (f"decode, {ssd}, {how}, alpha {alpha}", value)
        for how, row in (("without P.P", without), ("with P.P", pipelined))
        for alpha, value in zip(ALPHAS, row, strict=True)
    ]
    return _each(name, "Table V", "s", P, *rows)


_LENGTHS = "it follows from output lengths of 3 to 10 tokens and input lengths, which are not printed for the tasks"
_TASKS = [
    ("EM:Fodors-Zagats", 189, 5.84, [75.28, 67.17, 86.40, 79.06]),
    ("EM:Walmart-Amazon", 200, 5.87, [80.92, 72.18, 93.17, 85.41]),
    ("DI:Buy", 65, 3.89, [30.55, 27.90, 34.05, 29.27]),
    ("ED:Hospital", 200, 1.58, [19.63, 19.60, 19.62, 19.66]),
]


def _tasks() -> list[Claim]:
    """Table VI, six values a task."""
    claims = []
    for number, (name, queries, size, seconds) in enumerate(_TASKS):
        a, b, *rest = list(ascii_lowercase[6 * number : 6 * number + 6])
        claims.append(_one(f"d20{a}", f"{name}: queries", queries, "x", "Table VI", I))
        claims.append(_one(f"d20{b}", f"{name}: KV", size, "GB", "Table VI", I))
        who = [f"{name}: SSD {ssd}, {system}" for ssd in SSDS for system in ("Baseline", "Dual-Blade")]
        for letter, text, value in zip(rest, who, seconds, strict=True):
            claims.append(_one(f"d20{letter}", text, value, "s", "Table VI", X, _LENGTHS))
    return claims


CLAIMS = (
    *_each("d1", "III-A", "GB", P, ("KV behind the prompt", 8.57), ("KV at the end", 9.11)),
    *_each(
        "d1", "III-B", "MiB", P, ("K or V of a layer behind the prompt", 128), ("the same at the end", 135), after="b"
    ),
    _one("d1e", "K or V of a layer, one step", 256, "KiB", "III-B"),
    *_requests("d2", "writes", [(668, 3.50), (662, 1.62), (662, 1.14)]),
    *_requests("d3", "reads", [(351, 17.8), (340, 1.19), (339, 0.86)]),
    _one("d4a", "Baseline's hits in decode at 10 to 11 GB", 100, "%", "III-A"),
    _one(
        "d4b",
        "the same a step below",
        42,
        "%",
        "III-A",
        X,
        "what goes round and does not fit an LRU finds nothing: a kernel that keeps 42 % is no LRU, as III-A has it",
    ),
    Claim("d4c", "the same at 2 to 7 GB", 1, "%", "III-A", P, COMMAND, "<"),
    *_each(
        "d5",
        "III-B",
        "%",
        I,
        ("Baseline's prefill, 11 GB: what is not I/O", 72),
        ("the same: disk", 24),
        ("Baseline's prefill, 2 GB: what is not I/O", 66),
        ("the same: disk", 28),
    ),
    *_each(
        "d6",
        "III-B",
        "%",
        P,
        ("decode of all of Baseline's time, 11 GB", 82),
        ("the same, 2 GB", 89),
        ("disk, that is copies in memory, of Baseline's decode, 11 GB", 56),
    ),
    _one(
        "d6d",
        "disk of Baseline's decode, 2 GB",
        69,
        "%",
        "III-B",
        X,
        "18.80 ms for a tensor (d9c) make 77 % of it and more",
    ),
    _one("d7a", "prefill cut by Dual-Blade, most, SSD A", 33.1, "%", "V-B"),
    _one(
        "d7b",
        "the same, SSD B",
        25.4,
        "%",
        "V-B",
        X,
        "Baseline's writes take longer on B (41.15 ms) than on A (35.79), and all are hidden: its cut cannot be less",
    ),
    _one(
        "d7c",
        "Baseline's prefill slows below",
        6,
        "GB",
        "III-A",
        X,
        "it follows from the kernel's limits of dirty pages, which are not said",
    ),
    _one("d8a", "decode cut by Dual-Blade over 2 to 11 GB, least, SSD A", 8.2, "%", "V-B"),
    _one("d8b", "the same, most, SSD A", 42.4, "%", "V-B"),
    _one(
        "d8c",
        "the same, least, SSD B",
        11.7,
        "%",
        "V-B",
        X,
        "at 11 GB nothing is read from an SSD, so A's 8.2 must be B's too",
    ),
    _one("d8d", "the same, most, SSD B", 57.8, "%", "V-B"),
    *_latencies("d9", "A, Baseline", I, [(35.79, 109.40), (18.80, 79.59), (4.91, 8.26)]),
    *_latencies("d10", "A, Dual-Blade", P, [(21.18, 21.26), (11.17, 12.67), (0.06, 0.06)]),
    *_latencies("d11", "B, Baseline", I, [(41.15, 148.95), (32.29, 85.38), (4.47, 8.98)]),
    *_latencies("d12", "B, Dual-Blade", I, [(22.85, 94.00), (19.03, 23.64), (0.06, 0.15)]),
    *_each(
        "d13",
        "Table IV",
        "%",
        I,
        *[
            (f"busy, {ssd}, {system}, {what}", value)
            for (ssd, system, row) in (
                ("A", "Baseline", (44.79, 54.58, 100)),
                ("A", "Dual-Blade", (100, 98.45, 100)),
                ("B", "Baseline", (89.15, 86.99, 100)),
                ("B", "Dual-Blade", (100, 94.58, 100)),
            )
            for what, value in zip(("prefill write", "decode read", "decode write"), row, strict=True)
        ],
    ),
    _one(
        "d14a",
        "utilization in prefill, Dual-Blade over Baseline, SSD A",
        2.2,
        "x",
        "V-D",
        X,
        "44.79 % of 35.79 ms would be 8.4 GB/s, more than A writes: writing back goes on outside of the window; "
        "the times of d9a and d10a give 1.69",
    ),
    *[
        Claim(
            f"d14{letter}",
            f"decode writes cut by Dual-Blade, SSD {ssd}: from Table IV",
            98,
            "%",
            "V-D",
            I,
            COMMAND,
            ">",
        )
        for letter, ssd in zip("bc", SSDS, strict=True)
    ],
    *_each(
        "d15",
        "V-D",
        "x",
        X,
        ("writing in prefill, NVMe-direct-Only over Baseline, SSD A", 1.43),
        ("reading in decode, the same", 2.20),
        ("writing, SSD B", 1.43),
        ("reading, SSD B", 1.88),
        reason="Table IV's times of a tensor give other ratios; a decode cut of 42.4 % allows 1.74 and not 2.20",
    ),
    *_decodes("d16", "A", [31.13, 28.74, 26.59], [28.29, 26.80, 24.69]),
    *_decodes("d17", "B", [41.52, 36.39, 30.27], [40.09, 34.91, 28.82]),
    *_each(
        "d18",
        "V-F",
        "%",
        I,
        ("P.P saves, SSD A, least: from Table V", 7),
        ("the same, most", 9),
        ("P.P saves, SSD B, least: from Table V", 3),
        ("the same, most", 5),
    ),
    *_each("d19", "V-F", "GB/s", C, ("layers of Group 1, intra", 11.93), ("layers of Group 1, cross", 13.13)),
    *_tasks(),
    _one(
        "d20y",
        "DI:Buy, Dual-Blade over Baseline in the text",
        0.85,
        "x",
        "V-G",
        X,
        "Table VI gives 0.86 on B, 0.91 on A",
    ),
    _one("d21", "write amplification", 1, "x", "IV-B"),
)
PRINTED = {claim.id: claim.value for claim in CLAIMS}

MEMORY_COPY = Constant(
    "memory_copy_gb_per_s",
    20.8,
    "GB/s",
    "two threads from the page cache to pinned memory: a third of two channels of DDR5, which a copy reads and writes",
    "d19a",
)
HINDERED = Constant(
    "hindered_share",
    0.43,
    "of a read's rate, while the GPU's DMA runs",
    "reads of SSD and page cache write the memory that DMA reads; 1 would be the ideal overlap",
    "d19b",
)
CALIBRATED = (MEMORY_COPY, HINDERED)
ANONYMOUS = Constant("anonymous_gib", 1.0, "GiB", "of the limit, what the runtime's own memory takes")
GPU_LINK = Constant("gpu_link_gb_per_s", 28.0, "GB/s", "PCIe 5.0 x8 as far as it can be used; in the host's profile")
TFLOPS = Constant("fp16_tflops", 47.4, "TFLOPS", "dense FP16 by tensor cores, not verified; in the GPU's profile")
AHEAD = Constant("layers_ahead", 0, "layers", "nothing hides the GPU's work: a layer comes when the one before is done")
COMMAND_A = Constant(
    "write_us", 15.0, "us", "a write of SSD A without its bytes; in its profile, B's is the data sheet's"
)
ASSUMED = (ANONYMOUS, GPU_LINK, TFLOPS, AHEAD, COMMAND_A)
