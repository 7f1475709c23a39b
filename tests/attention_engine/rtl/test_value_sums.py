"""value_sums: sums of value pages under weights of 7 bits, equal to the golden model."""

import os

import cocotb
import numpy as np
import pytest
from cocotb.triggers import RisingEdge
from cocotb.utils import get_sim_time
from progressive_pages import any_value_page
from rtl_bench import PRESSURES, Coverage, Sink, Source, pack, parameters, reset, simulate, start

from attention_engine.rtl.golden_progressive import value_sums
from attention_engine.rtl.params import ProgressiveShape

COVER = Coverage()
FIELDS = ("tdata", "tid", "tlast")


def shape():
    p = parameters()
    page_bytes = int(os.environ["RTL_PAGE_BYTES"])
    return ProgressiveShape(
        head_dim=p["DIM"] * p["PARTS"], m=p["DIM"], q_heads=p["Q_HEADS"], v_bits=p["V_BITS"], page_bytes=page_bytes
    )


def words(W, powers):
    """Weights (G, tokens) block by block, query by query."""
    block, beats = shape().form.value_block, []
    for at in range(0, W.shape[1], block):
        for row, power in zip(W.tolist(), powers, strict=True):
            beats.append({"tdata": pack(row[at : at + block], 7), "tuser": power, "tlast": at + block >= W.shape[1]})
    return beats


def beats(page, tokens, part, first, last):
    blocks = [page[at : at + 16] for at in range(0, len(page), 16)]
    user = tokens | first << 9 | last << 10
    return [
        {"tdata": int.from_bytes(b, "little"), "tuser": user, "tdest": part, "tlast": i == len(blocks) - 1}
        for i, b in enumerate(blocks)
    ]


def any_run(numbers, lengths):
    """For each of some tokens pages of all parts: (page, part, W, powers)."""
    G, pages = shape().q_heads, []
    for length in lengths:
        for part in numbers.permutation(shape().parts).tolist():
            W = numbers.integers(0, 128, (G, length))
            W[numbers.random(W.shape) < 0.2] = 0
            if numbers.random() < 0.2:
                W[:] = 127
            pages.append((any_value_page(numbers, shape()), part, W, numbers.integers(0, 33, G).tolist()))
    return pages


def due(pages):
    size = shape()
    totals = [[0] * size.head_dim for _ in range(size.q_heads)]
    for page, part, W, powers in pages:
        for g, row in enumerate(value_sums(W, page, size).tolist()):
            for i, value in enumerate(row):
                totals[g][part * size.m + i] += value << powers[g]
    flat = [(g, value) for g, row in enumerate(totals) for value in row]
    return [{"tdata": v & (1 << 64) - 1, "tid": g, "tlast": int(i == len(flat) - 1)} for i, (g, v) in enumerate(flat)]


class Bench:
    """The unit between weights, pages and sums."""

    def __init__(self, dut, rng, pressure=(0.0, 0.0)):
        self.s_w, self.s_page = (Source(dut, name, rng, pressure[0], COVER) for name in ("s_w", "s_page"))
        self.sink = Sink(dut, "m", FIELDS, rng, pressure[1], COVER)
        self.dut = dut

    async def give(self, pages):
        size = shape().parts
        weights = [word for _, _, W, powers in pages for word in words(W, powers)]
        task = cocotb.start_soon(self.s_w.send(weights))
        begin = get_sim_time("ns")
        for number, (page, part, W, _) in enumerate(pages):
            first, last = number < size, number == len(pages) - 1
            await self.s_page.send(beats(page, W.shape[1], part, first, last))
        await task
        return round((get_sim_time("ns") - begin) / 10)

    async def check(self, pages):
        cycles = await self.give(pages)
        want = due(pages)
        got = await self.sink.wait(len(want))
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            assert one == other, f"sum {number}: {one} came, {other} was due"
        return cycles

    def stop(self):
        self.sink.task.cancel()
        self.dut.s_w_tvalid.value = self.dut.s_page_tvalid.value = 0


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_pages(dut, pressure):
    """Runs of one page and of several, whole and cut short, with weights of many powers."""
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng, pressure)
    most = shape().form.value_tokens
    for lengths in ([most], [most, rng.randrange(1, most), 1], [most] * 3, [rng.randrange(1, most)]):
        await bench.check(any_run(numbers, lengths))
        COVER.hit("cut short" if lengths[-1] < most else "whole", "one page" if len(lengths) == 1 else "pages")


@cocotb.test()
async def beat_takes_one_cycle_per_query(dut):
    """One cycle for each beat of lines; sizes, and beats after the last token, are skipped. Weights arrive in time."""
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng)
    form = shape().form
    measured = await bench.check(any_run(numbers, [form.value_tokens] * 2))
    lines = form.value_tokens // form.value_block * form.value_lines * 4
    formula = 2 * shape().parts * (shape().page_bytes // 16 + lines * (shape().q_heads - 1))
    assert measured <= formula + 8 * shape().parts


@cocotb.test()
async def reset_at_any_time(dut):
    """Broken off in sizes, in lines, while sums go out; the next run is right."""
    rng = await start(dut)
    numbers = np.random.default_rng(rng.getrandbits(32))
    for wait in (5, 200, 0):
        bench = Bench(dut, rng)
        task = cocotb.start_soon(bench.give(any_run(numbers, [shape().form.value_tokens])))
        if wait == 0:
            while len(bench.sink.beats) < 5:
                await RisingEdge(dut.clk)
        for _ in range(wait):
            await RisingEdge(dut.clk)
        task.cancel()
        bench.stop()
        await reset(dut)
        bench = Bench(dut, rng)
        await bench.check(any_run(numbers, [shape().form.value_tokens]))
        bench.stop()


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("cut short", "whole", "one page", "pages")
    COVER.require("s_w idle", "s_w held up", "s_page idle", "m waits", "m held up")
    if shape().q_heads > 1:
        COVER.require("s_page held up")


SMALL = ProgressiveShape(head_dim=64, m=32, q_heads=2, page_bytes=768)
FOUR_BITS = ProgressiveShape(head_dim=64, m=64, q_heads=2, v_bits=4)
PAGE = ProgressiveShape(head_dim=128, m=128)
NARROW = ProgressiveShape(head_dim=16, m=16, page_bytes=512)  # a block of four beats
GROUP = ProgressiveShape(head_dim=64, m=64, q_heads=7)


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "shape"),
    [("icarus", SMALL), ("verilator", FOUR_BITS), ("verilator", PAGE), ("verilator", NARROW), ("verilator", GROUP)],
    ids=["icarus", "4 bits", "128", "16", "64 x 7"],
)
def test_value_sums(simulator, shape):
    page_bytes = str(shape.page_bytes)
    simulate("value_sums", shape.value_sums(), simulator, covers=shape.q_heads > 1, RTL_PAGE_BYTES=page_bytes)
