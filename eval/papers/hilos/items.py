"""Every predicted quantity of HILOS under one draw of inputs, by id of `predictions.csv`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from statistics import geometric_mean

from vcsd_eval.papers.hilos.inputs import Inputs
from vcsd_eval.papers.hilos.systems import BATCH, FRACTIONS, GB, OUTPUT, SSD, HilosBatch, Systems, load_model
from vcsd_eval.papers.profiles import Gpu

Values = dict[str, float]
CONTEXTS = tuple(1024 * kilo for kilo in (16, 32, 64, 128))  # tokens
OPTS, OTHERS = ("opt-30b", "opt-66b", "opt-175b"), ("qwen2.5-32b", "mixtral-8x7b", "glam-143b")
OPT66, OPT175, H100, DRIVES = load_model("opt-66b"), load_model("opt-175b"), Gpu.load("h100"), (4, 8, 16)
BUFFERS = tuple(2**power for power in range(8))  # tokens
CLOCK_GHZ, LANES = 0.29605, 128  # of the accelerator; multiply-accumulate units for each query head of a group
USD = {"flex": 23_600, "dram": 22_000, "h100": 46_600} | {str(n): 32_000 + 2_400 * n for n in DRIVES}
RATED_BYTES = 7.008e15  # writes of a drive
REQUESTS = ((256, 100), (1024, 350), (8192, 350))  # input and output tokens
FLASH_GB_PER_S, DRAM_GB_PER_S = 16, 68  # of the modelled in-storage device


def values(inputs: Inputs) -> Values:
    """All predicted quantities, in the units of `predictions.csv`."""
    parts, s = (_parts, _figure_10, _figure_12, _sweeps, _ablation, _wear, _others), Systems(inputs)
    return {name: value for part in parts for name, value in part(s).items()}


def _named(prefix: str, letters: str, figures: Iterable[float]) -> Values:
    return {f"{prefix}{letter}": value for letter, value in zip(letters, figures, strict=True)}


def _drawn(s: Systems) -> tuple[int, int]:
    """Context in tokens and number of drives, for claims whose setting is not known."""
    return CONTEXTS[int(s.inputs.context_draw)], DRIVES[1 + int(s.inputs.drives_draw)]


def _parts(s: Systems) -> Values:
    """Memory, shares of a step, and the kernel: two operations for each two bytes and query head of its group."""
    i, (tokens, drives) = s.inputs, _drawn(s)
    work, largest = HilosBatch(OPT66, tokens), HilosBatch(OPT175, CONTEXTS[-1])
    parts_s = s.flex_parts(HilosBatch(OPT175, tokens), s.raid())
    gpu_s = s.hilos_parts(work, drives, 0)[-1] * OPT66.layers
    rate = i.drive_dram_gb_per_s
    return {
        "f2a": (OPT175.weight_bytes + largest.kv_bytes * OPT175.layers) / 1e12,
        "f2b": 100 * parts_s[0] / sum(parts_s),
        "f3a": s.flex(work) / s.flex(work, s.raid(1)),
        "f4a": 100 * gpu_s * s.hilos(work, drives, 0) / BATCH,
        **_named("t3", "abc", (min(d * rate, 2 * d * LANES * CLOCK_GHZ) for d in (1, 4, 5))),
        **_named("s64", "ab", (rate, rate / i.drive_gb_per_s)),
        "f18a": 100 * 2 * FLASH_GB_PER_S / DRAM_GB_PER_S,  # pages enter and leave the DRAM
    }


def _figure_10(s: Systems) -> Values:
    """OPT models at 16K to 128K tokens, baselines in host memory at the batch that fits; prices of Fig. 16a."""
    works = {(name, tokens): HilosBatch(load_model(name), tokens) for name in OPTS for tokens in CONTEXTS}
    batches = {cell: s.host_batch(work.model, work.tokens) for cell, work in works.items()}
    fit = {cell: replace(works[cell], batch=batch) for cell, batch in batches.items() if batch}

    def of(
        system: Callable[[HilosBatch], float], cells: Mapping[tuple[str, int], HilosBatch] = works
    ) -> dict[tuple[str, int], float]:
        return {cell: system(work) for cell, work in cells.items()}

    rates = {
        "flex": of(s.flex),
        "plain": of(partial(s.flex, rate=s.raid16())),
        "h100": of(replace(s, gpu=H100).flex),
        "dram": of(partial(s.flex, rate=math.inf), fit),
        "uvm": of(s.uvm, fit),
        **{str(n): of(partial(s.hilos, drives=n)) for n in DRIVES},
    }

    def ratios(one: str, other: str, name: str = "", price: float = 1) -> list[float]:
        both = rates[one].keys() & rates[other].keys()
        return [price * rates[one][cell] / rates[other][cell] for cell in both if cell[0].startswith(name)]

    def worth(other: str, name: str) -> float:
        return max(max(ratios(str(n), other, name, USD[other] / USD[str(n)])) for n in DRIVES)

    means = [
        *((each, "flex") for each in ("4", "8", "16", "dram", "uvm", "h100", "plain")),
        ("16", "dram"),
        ("4", "dram"),
    ]
    costs = (("flex", "opt-66b"), ("flex", "opt-175b"), ("dram", "opt-66b"), ("h100", "opt-66b"))
    return {
        **_named("f10", "abcdef", (max(ratios(n, "flex", name)) for n in ("16", "4") for name in OPTS)),
        **_named("f10", "ghijklmno", (geometric_mean(ratios(*mean)) for mean in means)),
        "f10p": max(ratios("16", "dram")),
        "f10q": len(works) - len(fit),
        **_named("f16", "abcd", (worth(*cost) for cost in costs)),
    }


def _figure_12(s: Systems) -> Values:
    tokens, drives = _drawn(s)
    works = [HilosBatch(load_model(name), tokens) for name in OTHERS]
    full, one = (s.hilos(HilosBatch(OPT66, CONTEXTS[1], batch), 8) for batch in (BATCH, 1))
    speedups = [s.hilos(work, drives) / s.flex(work) for work in works]
    return _named("f12", "abcdef", (full, full / one, s.host_batch(OPT66, CONTEXTS[1]), *speedups))


def _sweeps(s: Systems) -> Values:
    """OPT-66B, 8 drives: alpha and c, and the output length with prefill included."""
    work = HilosBatch(OPT66, _drawn(s)[0])
    alphas = {fraction: s.hilos(work, 8, fraction) for fraction in FRACTIONS}
    buffers = {buffer: s.hilos(work, 8, buffered=buffer) for buffer in BUFFERS}
    best, best_buffer = max(alphas, key=alphas.__getitem__), max(buffers, key=buffers.__getitem__)
    gains = alphas[best] / alphas[0], best_buffer, buffers[16] / buffers[1], buffers[64] / buffers[16]
    return _named("f13", "abcde", (best, *gains)) | {f"out{n}": _whole_speedup(s, n) for n in (OUTPUT, 512)}


def _whole_speedup(s: Systems, output: int) -> float:
    """Seconds of FLEX(SSD) over those of HILOS with 8 drives, OPT-66B, 32K tokens; prefill hides writes of KV data."""
    i, work = s.inputs, HilosBatch(OPT66, CONTEXTS[1])
    prefill_s = s.cost(OPT66).prefill_s(work.tokens, batch=BATCH)
    write_rates = 4 * SSD.write_gb_per_s * i.ssd_fraction, min(8 * i.flash_write_gb_per_s, i.uplink_gb_per_s)
    flex_s, near_s = (max(prefill_s, work.kv_bytes * OPT66.layers / (GB * rate)) for rate in write_rates)
    middle, tokens = replace(work, tokens=work.tokens + output // 2), output * BATCH
    return (flex_s + tokens / s.flex(middle)) / (near_s + tokens / s.hilos(middle, 8))


def _ablation(s: Systems) -> Values:
    tokens, drives = _drawn(s)
    rate, flex = partial(s.hilos, HilosBatch(OPT66, tokens), drives), s.flex(HilosBatch(OPT66, tokens))
    near, whole = rate(0, 1), rate()
    return _named("f15", "abcde", (near / flex, rate(0) / near, rate(None, 1) / near, whole / near, whole / flex))


def _wear(s: Systems) -> Values:
    """Requests of OPT-66B until 16 drives have taken their rated writes."""
    i = s.inputs
    saved = 1 - s.fraction(HilosBatch(OPT66, _drawn(s)[0]), 16) / 2

    def written(prompt: int, output: int, buffered: int = 16) -> float:
        """Tokens of a request whose KV data is written."""
        return prompt + buffered * (output // buffered if i.rest_draw < 0.5 else -(-output // buffered))

    gains = ((n + output * i.baseline_write_factor) / (saved * written(n, output)) for n, output in REQUESTS)
    longest = 16 * RATED_BYTES / (saved * written(*REQUESTS[2]) * OPT66.shape.kv_bytes_per_token)
    return _named("f16", "efghi", (*gains, longest / 1e6, written(*REQUESTS[1]) / written(*REQUESTS[1], 32)))


def _others(s: Systems) -> Values:
    """Energy, the cluster of GPUs, and flash in use; HILOS with 16 drives."""
    i, tokens, (_, short, _, long) = s.inputs, _drawn(s)[0], CONTEXTS
    near = {context: s.hilos(HilosBatch(OPT66, context), 16) for context in CONTEXTS}
    waiting_w = i.gpu_w + i.dram_w
    flex_w, near_w = waiting_w + i.flex_cpu_w + 4 * i.ssd_w, waiting_w + i.hilos_cpu_w + 16 * i.drive_w
    saved = 1 - near_w / near[tokens] * s.flex(HilosBatch(OPT66, tokens)) / flex_w
    cluster = (near[each] / s.cluster(OPT66, each) for each in (short, long))
    peak = HilosBatch(OPT175, long)
    stored = peak.kv_bytes * OPT175.layers * (1 - s.fraction(peak, 16) / 2) + OPT175.weight_bytes
    return _named("f17", "abcd", (100 * saved, near_w / near[short], *cluster)) | {"s7a": stored / 16 / GB}
