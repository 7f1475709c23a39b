"""What Tutti (arXiv 2605.03375) prints, and what it does not.

The paper's values come by two ways, and the source of each names its own: a review of it, and notes on it that cite its
pages. Values that only the review has wrong are rows of their own (r1 and on).
"""

from __future__ import annotations

from string import ascii_lowercase

from eval.papers.paper import Claim, Constant, Kind

I, C, P, X, N = Kind.INPUT, Kind.CALIBRATED, Kind.PREDICTED, Kind.CONTRADICTION, Kind.UNMODELLED  # noqa: E741
COMMAND = "vcsd eval claims --paper tutti"
REVIEW, NOTES = "review", "notes"
Row = tuple[str, float, Kind] | tuple[str, float, Kind, str]  # what it is, what is printed, kind, its reason


def _rows(name: str, source: str, unit: str, *rows: Row, by: str = REVIEW, after: str = "") -> list[Claim]:
    """A claim for each row, with letters behind the last that was used. by: who says so."""
    letters = ascii_lowercase[ascii_lowercase.index(after) + 1 if after else 0 :]
    return [
        Claim(f"{name}{letter}", text, value, unit, f"{source}; {by}", kind, COMMAND, reason="".join(reason))
        for letter, (text, value, kind, *reason) in zip(letters, rows, strict=False)
    ]


GPU = "needs a GPU: it times code on one"
DECODE = "needs a GPU: decode beside reads and writes is not modelled"
VERSION = "needs a GPU: what this version of vLLM computes in which time is not printed"
IDLE = "needs a GPU: gaps between kernels without any I/O"
STAGING = "needs a GPU: cuFile's staging buffers are not modelled"
DRAM = "DRAM by t5 and t6 is about twice too slow on LEval, where t1b shows it too, and twice too fast on LooGLE"
GDS_RATE = "GDS at this rate would be {}, where t8 prints 11.9 GB/s and t1 wants 5"
LAYERED = "reads by layers hide behind what is computed, and cannot make the bubble longer"
RECOMPUTE = "t6 prints the bubble of the same reuse; beside it recomputing takes as long as t12 fixes"
PATH_LAYERS = "needs a DRAM path without layers below 96K and one of 31 GB/s beyond; t15 needs layers and 20 GB/s"
RATIO = "25.9 / 11.9, its own values"
HEADS = "the model's configuration has heads of 128, not of 80"
UNITS = "neither seconds nor milliseconds: 10.7 GB over four SSDs take 185 ms"
SLOWER = "would need 2.2 times less throughput; the 1.21 GB/s of t6 give less than that"
LENGTHS = "the lengths of requests are not printed; those of other papers keep ratios (t1, t3), not seconds"
BEHIND = "falls behind at this rate, by t5 and t6; how long was measured is not printed"
OF_REVIEW = "the review's own error: "

CLAIMS = (
    *_rows(
        "t1", "abstract", "%", ("TTFT below GDS, LEval, 1.5/s", 78.3, C), ("TTFT below DRAM, LEval, 1.5/s", 69.1, P)
    ),
    *_rows(
        "t2",
        "evaluation",
        "x",
        ("rate under 1 s over DRAM, LEval", 1.5, X, DRAM),
        ("rate under 1 s over GDS, LEval", 2, P),
    ),
    *_rows(
        "t3",
        "evaluation",
        "%",
        ("TTFT below DRAM, LooGLE, 0.6/s", 93.2, X, DRAM),
        ("TTFT below GDS, LooGLE, 0.6/s (2.63x)", 62.0, P),
    ),
    *_rows("t4", "evaluation", "%", ("t1a on vLLM 0.12", 71.8, N, VERSION), by=NOTES),
    *_rows(
        "t4",
        "evaluation",
        "%",
        ("ITL below DRAM, LEval", 22.0, N, DECODE),
        ("ITL below GDS, LEval", 24.4, N, DECODE),
        after="a",
    ),
    *_rows(
        "t4",
        "evaluation",
        "%",
        ("ITL below GDS, LooGLE, least", 10.2, N, DECODE),
        ("ITL below GDS, LooGLE, most", 18.3, N, DECODE),
        by=NOTES,
        after="c",
    ),
    *_rows("t5", "Table 1", "%", ("hits, LEval: HBM", 8, I)),
    *_rows(
        "t5",
        "Table 1",
        "%",
        ("hits, LEval: DRAM", 53, I),
        ("hits, LEval: SSD", 84, I),
        ("hits, LooGLE: HBM", 4, I),
        ("hits, LooGLE: DRAM", 24, I),
        ("hits, LooGLE: SSD", 86, I),
        by=NOTES,
        after="a",
    ),
    *_rows(
        "t6",
        "Fig. 2",
        "%",
        ("bubble, 64K, 75 % stored, vLLM 0.17: HBM", 1.7, N, IDLE),
        ("the same: DRAM", 14.2, C),
        ("the same: SSD", 72.8, C),
        ("the same: SSD by layers", 78.9, X, LAYERED),
        by=NOTES,
    ),
    *_rows("t6", "Fig. 2", "%", ("the same: GDS", 72.3, X, GDS_RATE.format("1.25 GB/s")), after="d"),
    *_rows(
        "t6",
        "Fig. 2",
        "%",
        ("bubble on vLLM 0.12: HBM", 9.4, N, IDLE),
        ("bubble on vLLM 0.12: DRAM", 30.5, N, VERSION),
        ("bubble on vLLM 0.12: SSD", 76.9, N, VERSION),
        ("bubble on vLLM 0.12: SSD by layers", 84.0, N, VERSION),
        ("bubble on vLLM 0.12: GDS", 73.0, N, VERSION),
        by=NOTES,
        after="e",
    ),
    *_rows("t7", "evaluation", "%", ("time of recomputing below reuse from the SSD", 33.9, X, RECOMPUTE), by=NOTES),
    *_rows("t8", "Fig. 9", "GB/s", ("retrieve, Tutti", 25.9, I), ("retrieve, GDS", 11.9, I)),
    *_rows("t8", "Fig. 9", "x", ("retrieve, Tutti over GDS", 2.08, X, RATIO), by=NOTES, after="b"),
    *_rows("t8", "Fig. 9", "GB/s", ("DRAM's dip at 16K", 8.5, I), by=NOTES, after="c"),
    *_rows("t9", "Fig. 9", "GB/s", ("store, Tutti", 9.8, I), ("store, GDS", 7, I)),
    *_rows("t9", "Fig. 9", "GB/s", ("store, DRAM", 18.4, I), by=NOTES, after="b"),
    *_rows(
        "t10",
        "3.1",
        "GB/s",
        ("one thread's reads, PRP", 0.287, N, GPU),
        ("one thread's reads, SGL (31.0x)", 8.891, N, GPU),
        ("one thread's writes, PRP", 0.032, N, GPU),
        ("one thread's writes, SGL (91.3x)", 2.922, N, GPU),
        by=NOTES,
    ),
    *_rows("t11", "3.1", "pages", ("of 64 KiB in a pool of 60 GiB", 983_040, P)),
    *_rows("t11", "3.1", "MiB", ("their PRP lists, 4 KiB each", 3840, P), ("their SGL entries", 15, P), after="a"),
    *_rows("t11", "3.1", "x", ("one over the other", 250, P), after="c"),
    *_rows(
        "t12",
        "evaluation",
        "s",
        ("TTFT, 128K, 112K stored: SSD", 7.84, C),
        ("TTFT, 128K, 112K stored: Tutti (2.28x)", 3.43, C),
        by=NOTES,
    ),
    *_rows(
        "t13",
        "evaluation",
        "%",
        ("TTFT below GDS, 32K of 128K stored", 5.8, P),
        ("TTFT below GDS, a question behind 128K", 61.4, X, GDS_RATE.format("10 GB/s")),
        by=NOTES,
    ),
    *_rows(
        "t14",
        "Fig. 11",
        "%",
        ("TTFT below DRAM, 96K of 128K stored", 13.4, X, PATH_LAYERS),
        ("TTFT over DRAM, a question behind 128K", 20.6, X, PATH_LAYERS),
    ),
    *_rows(
        "t15",
        "Fig. 13",
        "%",
        ("crossover, 32K: SSD", 50, P),
        ("crossover, 32K: DRAM by layers", 97.9, P),
        ("crossover, 32K: Tutti", 98.3, C),
    ),
    *_rows(
        "t16", "Fig. 13", "ms", ("Tutti's bubble, mean up to the crossover", 25, P), ("Tutti's bubble at 93.75 %", 6, P)
    ),
    *_rows("t17", "3.3", "%", ("reads beside writes (FIO, 256 MB)", -60.1, I)),
    *_rows("t17", "3.3", "GB/s", ("reads and writes together", 12, I), after="a"),
    *_rows("t18", "motivation", "objects", ("of 128K tokens, Qwen3-32B, 64 a block", 262_144, P)),
    *_rows("t18", "motivation", "KB", ("an object", 80, X, HEADS), after="a"),
    *_rows("t19", "Fig. 12", "s", ("TTFT, 640K, GLM-4-9B-1M on two GPUs", 1.2, P)),
    *_rows("t19", "Fig. 12", "K tokens", ("where GDS has no memory", 512, N, STAGING), after="a"),
    *_rows(
        "t19",
        "evaluation",
        "s",
        ("TTFT, 128K: Tutti", 155.743, X, UNITS),
        ("TTFT, 128K: GDS", 207.12, X, UNITS),
        by=NOTES,
        after="b",
    ),
    *_rows(
        "t20",
        "Fig. 14",
        "%",
        ("cost below GDS, LooGLE, 0.5/s", 27, P),
        ("cost below SSD, LooGLE, 0.5/s", 66.2, X, SLOWER),
    ),
    *_rows(
        "t21",
        "evaluation",
        "x",
        ("hash table, GPU over CPU: insert, least", 9.0, N, GPU),
        ("hash table: insert, most", 24.2, N, GPU),
        ("hash table: lookup, least", 25.6, N, GPU),
        ("hash table: lookup, most", 50.0, N, GPU),
        by=NOTES,
    ),
    *_rows(
        "t21",
        "evaluation",
        "ms",
        ("on the CPU: insert, 128K", 12.0, N, GPU),
        ("on the CPU: insert, 1M", 35.3, N, GPU),
        ("on the CPU: lookup, 128K", 4.2, N, GPU),
        ("on the CPU: lookup, 1M", 27.7, N, GPU),
        by=NOTES,
        after="d",
    ),
    *_rows(
        "t22",
        "motivation",
        "%",
        ("read rate at 4 KB over the full one", 80, I),
        ("write rate at 4 KB over the full one", 16, I),
        by=NOTES,
    ),
    *_rows("t22", "implementation", "queues", ("I/O queues of an SSD: 8 GPUs with 32", 256, I), after="b"),
    *_rows(
        "t23",
        "Fig. 8",
        "s",
        ("TTFT, LEval, 1.5/s: HBM", 7.2, X, BEHIND),
        ("TTFT, LEval, 1.5/s: DRAM", 2.8, X, LENGTHS),
        ("TTFT, LEval, 1.5/s: SSD", 6.5, X, BEHIND),
        ("TTFT, LEval, 1.5/s: GDS", 3.9, X, LENGTHS),
        ("TTFT, LEval, 1.5/s: Tutti", 0.87, X, LENGTHS),
    ),
    *_rows(
        "r1",
        "example",
        "ms",
        ("a layer of 64K tokens at 25.9 GB/s", 1.2, X, OF_REVIEW + "1 GiB is taken for 32 MB"),
        ("TTFT behind 64K", 112, X, OF_REVIEW + "what follows from a layer in 1.2 ms"),
    ),
    *_rows(
        "r2",
        "LMCache",
        "s",
        ("time of GDS", 9.4, X, OF_REVIEW + "a bubble of HBM in per cent (t6f)"),
        ("time of DRAM", 1.7, X, OF_REVIEW + "a bubble of HBM in per cent (t6a)"),
    ),
    *_rows("r3", "KV cache", "GiB", ("of 128K tokens", 32, X, OF_REVIEW + "twice what follows from the shape")),
    *_rows(
        "r4",
        "example",
        "ms",
        ("320 IOCBs of writes", 2.3, X, OF_REVIEW + "they hold 2048 objects of 32 KiB each, 21 GB"),
    ),
)
PRINTED = {claim.id: claim.value for claim in CLAIMS}

FLOPS = Constant("prefill_tflops", 384, "TFLOPS", "0.39 of an H100's 989, of 16K tokens", "t12b")
FLOPS_FEW = Constant("prefill_tflops_few", 245, "TFLOPS", "of few tokens behind a long prefix (t15, t16)", "t15c")
GDS_PATH = Constant("gds_gb_per_s", 5, "GB/s", "GDS under requests; t8 prints 11.9 at its best", "t1a")
SSD_PATH = Constant("ssd_gb_per_s", 1.21, "GB/s", "LMCache-SSD: file system, host memory and GPU in turn", "t6c")
DRAM_PATH = Constant("dram_gb_per_s", 20, "GB/s", "LMCache-DRAM, of a link of 50", "t6b")
SSD_LONG = Constant("ssd_long_gb_per_s", 3.4, "GB/s", "LMCache-SSD at 112K: no one rate fits t6 and t12", "t12a")
CALIBRATED = (FLOPS, FLOPS_FEW, GDS_PATH, SSD_PATH, DRAM_PATH, SSD_LONG)

START = Constant("start_ms", 8, "ms", "of a prefill: the weights take 4.8 ms to read, and kernels are launched")
LEVAL = Constant("leval_tokens", 16_340, "tokens", "mean length of a document of LEval, by other papers")
LOOGLE = Constant("loogle_tokens", 21_613, "tokens", "mean length of a document of LooGLE, by other papers")
SIGMA = Constant("sigma", 0.6, "of ln tokens", "lognormal lengths")
QUESTION = Constant("question", 256, "tokens", "behind a document, never stored")
RATE_STEP = Constant("rate_step", 0.25, "1/s", "between tested rates, up to 1.5 (t2)")
HALVINGS = Constant("halvings", 6, "shares", "stored in t16a, 1/2 to 63/64: which were meant is not printed")
SSD_TB = Constant("ssd_tb", 14, "TB a GPU", "beside 256 GB of pinned DRAM, which Tutti does without (t20)")
ASSUMED = (START, LEVAL, LOOGLE, SIGMA, QUESTION, RATE_STEP, HALVINGS, SSD_TB)
