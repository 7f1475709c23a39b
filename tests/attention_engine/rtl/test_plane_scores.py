"""plane_scores: logits from planes of bits, equal to the golden model bit by bit."""

import math

import cocotb
import numpy as np
import pytest
from cocotb.triggers import RisingEdge
from cocotb.utils import get_sim_time
from plane_pages import WIDTHS, any_score_page, score_page
from rtl_bench import PRESSURES, Coverage, Sink, Source, parameters, reset, signed, simulate, start

from attention_engine.clock import plane_cycles
from attention_engine.rtl.golden import LOGIT_FRAC
from attention_engine.rtl.golden_planes import plane_scores
from attention_engine.rtl.params import LOG2_E, PlaneShape

COVER = Coverage()
FIELDS = ("tdata", "tid", "tuser", "tlast")


def shape():
    p = parameters()
    return PlaneShape(head_dim=p["DIM"], q_heads=p["Q_HEADS"], page_bytes=p["PAGE_BYTES"])


def any_q(numbers, spread=2.0):
    return numbers.normal(0, spread, (shape().q_heads, shape().head_dim)).astype(np.float16)


def beats(page, tokens):
    blocks = [page[at : at + 16] for at in range(0, len(page), 16)]
    return [
        {"tdata": int.from_bytes(block, "little"), "tuser": tokens, "tlast": number == len(blocks) - 1}
        for number, block in enumerate(blocks)
    ]


def due(q, page, tokens):
    got = plane_scores(q.view(np.uint16), page, tokens, shape())
    COVER.hit("bad" if got.bad else "good", "saturates" if got.over.any() else "fits")
    return [
        {
            "tdata": int(x) & 0xFFFFFFFF,
            "tid": head,
            "tuser": 2 * int(got.over[head, token]) + got.bad,
            "tlast": int(head == len(q) - 1 and token == tokens - 1),
        }
        for head, row in enumerate(got.x)
        for token, x in enumerate(row)
    ]


class Bench:
    """The unit between q, pages and scores."""

    def __init__(self, dut, rng, pressure=(0.0, 0.0)):
        self.dut = dut
        self.s_q, self.s_page = (Source(dut, name, rng, pressure[0], COVER) for name in ("s_q", "s_page"))
        self.sink = Sink(dut, "m", FIELDS, rng, pressure[1], COVER)

    async def load(self, q):
        values = q.T.ravel().view(np.uint16).tolist()
        await self.s_q.send({"tdata": v, "tlast": i == len(values) - 1} for i, v in enumerate(values))

    async def check(self, q, pages):
        """pages: (bytes, tokens) in turn; returns the cycles from the first block to the last block and score."""
        await self.load(q)
        begin = get_sim_time("ns")
        await self.s_page.send(beat for page, tokens in pages for beat in beats(page, tokens))
        want = [beat for page, tokens in pages for beat in due(q, page, tokens)]
        while len(self.sink.beats) < len(want):
            before = len(self.sink.beats)
            for _ in range(4000):
                await RisingEdge(self.dut.clk)
                if len(self.sink.beats) > before:
                    break
            assert len(self.sink.beats) > before, f"{before} of {len(want)} scores came"
        taken = round((get_sim_time("ns") - begin) / 10)
        got = await self.sink.wait(len(want))
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            assert one == other, f"score {number}: {one} came, {other} was due"
        return taken

    def stop(self):
        self.sink.task.cancel()
        self.dut.s_q_tvalid.value = self.dut.s_page_tvalid.value = 0


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_pages(dut, pressure):
    """All kinds of widths one after the other, whole pages and some cut short, two q."""
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng, pressure)
    for turn in range(2):
        T = shape().tokens
        pages = [
            (any_score_page(kind, numbers, shape())[0], rng.choice((T, T - 1, rng.randrange(1, T + 1), 1)))
            for kind in WIDTHS[turn::2]
        ]
        await bench.check(any_q(numbers), pages)


@cocotb.test()
async def cycles_are_the_clocks(dut):
    """Heads of one page and of several, with widths of every kind; blocks are there at once."""
    rng = await start(dut)
    numbers, bench, off, T = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng), [], shape().tokens
    for kinds in (
        ("even",),
        ("even",) * 3,
        ("none first", "narrow first"),
        ("few", "wide", "none", "too many", "even"),
    ):
        tokens = len(kinds) * T - rng.choice((0, T - 1, rng.randrange(T)))
        pages = [any_score_page(kind, numbers, shape())[0] for kind in kinds]
        widths = [list(page[4 * shape().head_dim : shape().header_bytes]) for page in pages]
        lengths = [min(T, tokens - number * T) for number in range(len(pages))]
        measured = await bench.check(any_q(numbers), list(zip(pages, lengths, strict=True)))
        formula = plane_cycles(shape(), tokens, widths)
        dut._log.info(f"NOTE {kinds}, {tokens} tokens: {measured} cycles, the clock says {formula}")
        off.append(abs(formula / measured - 1))
        if set(kinds) == {"even"}:
            off.append(abs(plane_cycles(shape(), tokens) / measured - 1))
    assert max(off) <= 0.02


@cocotb.test()
async def scores_are_those_of_float64(dut):
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng)
    q = any_q(numbers)
    page, keys = any_score_page("even", numbers, shape())
    await bench.load(q)
    await bench.s_page.send(beats(page, shape().tokens))
    got = await bench.sink.wait(shape().tokens * len(q))
    x = np.array([signed(beat["tdata"], 32) for beat in got]).reshape(len(q), -1) / 2.0**LOGIT_FRAC
    off = abs(x - q.astype(float) @ keys.T * LOG2_E / math.sqrt(shape().head_dim)).max()
    dut._log.info(f"NOTE off from float64 by {off:.1e} at most, scores up to {abs(x).max():.0f}")
    assert off < 1e-5


@cocotb.test()
async def special_values(dut):
    """NaN and infinity in q, scales and least values; scores and coefficients beyond the range."""
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng)
    d, T = shape().head_dim, shape().tokens
    kinds = (
        "plain",
        "nan in q",
        "plain",
        "infinite scale",
        "nan least",
        "large",
        "high bit",
        "huge scale",
        "huge least",
    )
    factor = LOG2_E / math.sqrt(d)
    for kind in kinds:
        q, widths = any_q(numbers), (np.arange(d) % 3) * (np.arange(d) < shape().planes)
        scale, least = (numbers.normal(0, 1, d).astype(np.float16) for _ in range(2))
        if kind == "nan in q":
            q[-1, 3] = np.nan
        elif kind == "infinite scale":
            scale[0], scale[4] = np.nan, -np.inf  # of a channel without bits, and with one
        elif kind == "nan least":
            least[0] = np.nan
        elif kind == "large":
            scale[:], q[:] = 1000, 1
        elif kind in ("high bit", "huge scale"):  # 2^12 is exceeded by the second bit, by the first one
            scale[2], q[:, 2] = (3000 if kind == "high bit" else 5000) / 10 / factor, 10
        elif kind == "huge least":
            least[5], q[:, 5] = -60000, 8
        page, _ = score_page(shape(), scale, least, widths, numbers.integers(0, 256, (T, d)))
        await bench.check(q, [(page, T)])
        COVER.hit(kind)


@cocotb.test()
async def widths_come_late(dut):
    """The first row's coefficients are made long before it is known that the row is not the last one."""
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng)
    d, T, q = shape().head_dim, shape().tokens, any_q(numbers)
    widths = np.where(np.arange(d) < 4, 1, np.where(np.arange(d) < 16, 0, 2))
    scale, least = (numbers.normal(0, 1, d).astype(np.float16) for _ in range(2))
    page, _ = score_page(shape(), scale, least, widths, numbers.integers(0, 256, (T, d)))
    await bench.load(q)
    late = shape().header_bytes // 16 - 1
    for part in (beats(page, T)[:late], beats(page, T)[late:]):
        await bench.s_page.send(part)
        for _ in range(30):
            await RisingEdge(dut.clk)
    want = due(q, page, T)
    assert await bench.sink.wait(len(want)) == want


@cocotb.test()
async def reset_in_a_page(dut):
    """Broken off in the head, in the rows, while scores are given out; the next page is right."""
    rng = await start(dut)
    numbers = np.random.default_rng(rng.getrandbits(32))
    blocks = shape().page_bytes // 16
    for stop in (3, blocks // 2, blocks):
        bench = Bench(dut, rng)
        await bench.load(any_q(numbers))
        await bench.s_page.send(beats(any_score_page("even", numbers, shape())[0], shape().tokens)[:stop])
        for _ in range(30 if stop == blocks else 0):
            await RisingEdge(dut.clk)
        bench.stop()
        await reset(dut)
        bench = Bench(dut, rng)
        await bench.check(any_q(numbers), [(any_score_page("wide", numbers, shape())[0], shape().tokens)])
        bench.stop()


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("bad", "good", "saturates", "fits", "nan in q", "large", "high bit", "huge scale", "huge least")
    COVER.require("s_page idle", "s_page held up", "s_q idle", "m waits", "m held up")


SMALL = PlaneShape(head_dim=32, q_heads=2, page_bytes=1024)
NARROW = PlaneShape(head_dim=32, q_heads=1, page_bytes=512)  # a row of one block: sums are waited for
PAGE = PlaneShape(head_dim=128, q_heads=1)
GROUP = PlaneShape(head_dim=64, q_heads=3)


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "shape"),
    [("icarus", SMALL), ("verilator", NARROW), ("verilator", PAGE), ("verilator", GROUP)],
    ids=["icarus", "narrow", "128", "64 x 3"],
)
def test_plane_scores(simulator, shape):
    simulate("plane_scores", shape.verilog(), simulator)
