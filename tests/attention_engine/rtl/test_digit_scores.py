"""digit_scores: logits from score pages, equal to the golden model bit by bit."""

import math

import cocotb
import numpy as np
import pytest
from cocotb.triggers import RisingEdge
from cocotb.utils import get_sim_time
from progressive_pages import WIDTHS, any_score_page, score_page
from rtl_bench import PRESSURES, Coverage, Sink, Source, parameters, reset, signed, simulate, start

from attention_engine.clock import digit_cycles
from attention_engine.rtl.golden import LOGIT_FRAC
from attention_engine.rtl.golden_progressive import digit_scores
from attention_engine.rtl.params import LOG2_E, ProgressiveShape

COVER = Coverage()
FIELDS = ("tdata", "tid", "tuser", "tlast")


def shape():
    p = parameters()
    return ProgressiveShape(
        head_dim=p["DIM"] * p["PARTS"],
        m=p["DIM"],
        q_heads=p["Q_HEADS"],
        page_bytes=p["PAGE_BYTES"],
        k_bits=2 * p["DIGITS"] / p["DIM"],
    )


def any_q(numbers, spread=2.0):
    return numbers.normal(0, spread, (shape().q_heads, shape().head_dim)).astype(np.float16)


def any_pages(kind, numbers):
    """Pages of all parts of some tokens."""
    return [any_score_page(kind, numbers, shape())[0] for _ in range(shape().parts)]


def beats(page, tokens):
    blocks = [page[at : at + 16] for at in range(0, len(page), 16)]
    return [
        {"tdata": int.from_bytes(block, "little"), "tuser": tokens, "tlast": number == len(blocks) - 1}
        for number, block in enumerate(blocks)
    ]


def due(q, pages, tokens):
    """Scores, and the terms that each page adds to them: (query, acc, top, offset) page by page."""
    got = digit_scores(q.view(np.uint16), pages, tokens, shape())
    COVER.hit("bad" if got.bad else "good", "saturates" if got.over.any() else "fits")
    scores = [
        {
            "tdata": int(got.x[head, token]) & 0xFFFFFFFF,
            "tid": head,
            "tuser": 2 * int(got.over[head, token]) + got.bad,
            "tlast": int(head == len(q) - 1 and token == tokens - 1),
        }
        for token in range(tokens)
        for head in range(len(q))
    ]
    parts = [
        (head, int(part.acc[head, token]), int(part.top[head]), int(part.offset[head]))
        for part in got.parts
        for token in range(tokens)
        for head in range(len(q))
    ]
    return scores, parts


class Bench:
    """The unit between q, pages and scores."""

    def __init__(self, dut, rng, pressure=(0.0, 0.0)):
        self.dut, self.parts = dut, []
        self.s_q, self.s_page = (Source(dut, name, rng, pressure[0], COVER) for name in ("s_q", "s_page"))
        self.sink = Sink(dut, "m", FIELDS, rng, pressure[1], COVER)
        self.task = cocotb.start_soon(self._watch())

    async def _watch(self):
        while True:
            await RisingEdge(self.dut.clk)
            if self.dut.part_valid.value == 1 and self.dut.rst.value == 0:
                acc, offset = signed(int(self.dut.part_acc.value), 19), signed(int(self.dut.part_offset.value), 60)
                self.parts.append((int(self.dut.part_id.value), acc, int(self.dut.part_top.value), offset))

    async def load(self, q):
        values = q.T.ravel().view(np.uint16).tolist()
        await self.s_q.send({"tdata": v, "tlast": i == len(values) - 1} for i, v in enumerate(values))

    async def check(self, q, groups):
        """groups: (pages, tokens) in turn; returns the cycles from the first beat to the last beat and score."""
        await self.load(q)
        self.parts.clear()
        begin = get_sim_time("ns")
        await self.s_page.send(beat for pages, tokens in groups for page in pages for beat in beats(page, tokens))
        want = [due(q, pages, tokens) for pages, tokens in groups]
        scores, parts = ([one for group in want for one in group[i]] for i in (0, 1))
        while len(self.sink.beats) < len(scores):
            before = len(self.sink.beats)
            for _ in range(4000):
                await RisingEdge(self.dut.clk)
                if len(self.sink.beats) > before:
                    break
            assert len(self.sink.beats) > before, f"{before} of {len(scores)} scores came"
        taken = round((get_sim_time("ns") - begin) / 10)
        got = await self.sink.wait(len(scores))
        assert self.parts == parts, "acc, e or offset of a token"
        for number, (one, other) in enumerate(zip(got, scores, strict=True)):
            assert one == other, f"score {number}: {one} came, {other} was due"
        return taken

    def stop(self):
        self.sink.task.cancel()
        self.task.cancel()
        self.dut.s_q_tvalid.value = self.dut.s_page_tvalid.value = 0


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_tokens(dut, pressure):
    """All kinds of digits one after the other, whole pages and some cut short, two q."""
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng, pressure)
    T = shape().form.T
    for turn in range(2):
        groups = [
            (any_pages(kind, numbers), rng.choice((T, T - 1, rng.randrange(1, T + 1), 1))) for kind in WIDTHS[turn::2]
        ]
        await bench.check(any_q(numbers), groups)


@cocotb.test()
async def cycles_equal_clock_model(dut):
    """Heads of one page and of several; beats are there at once."""
    rng = await start(dut)
    numbers, bench, off, T = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng), [], shape().form.T
    for kinds in (("even",), ("even",) * 4, ("few", "none", "wide")):
        tokens = len(kinds) * T - rng.choice((0, T - 1, rng.randrange(T)))
        pages = [any_pages(kind, numbers) for kind in kinds]
        widths = [list(page[4 * shape().m : 5 * shape().m]) for group in pages for page in group]
        lengths = [min(T, tokens - number * T) for number in range(len(pages))]
        measured = await bench.check(any_q(numbers), list(zip(pages, lengths, strict=True)))
        formula = digit_cycles(shape(), tokens, widths)
        dut._log.info(f"NOTE {kinds}, {tokens} tokens: {measured} cycles, the clock says {formula}")
        off.append(abs(formula / measured - 1))
        if set(kinds) == {"even"}:
            off.append(abs(digit_cycles(shape(), tokens) / measured - 1))
    assert max(off) <= 0.02


@cocotb.test()
async def scores_equal_float64(dut):
    """The error is at most that of rounding to int8."""
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng)
    q = any_q(numbers)
    pages, keys = zip(*(any_score_page("even", numbers, shape()) for _ in range(shape().parts)), strict=True)
    await bench.load(q)
    await bench.s_page.send(beat for page in pages for beat in beats(page, shape().form.T))
    got = await bench.sink.wait(shape().form.T * len(q))
    x = np.array([signed(beat["tdata"], 32) for beat in got]).reshape(-1, len(q)).T / 2.0**LOGIT_FRAC
    off = abs(x - q.astype(float) @ np.concatenate(keys, 1).T * LOG2_E / math.sqrt(shape().head_dim))
    dut._log.info(f"NOTE off from float64 by {off.max():.1e} at most, scores up to {abs(x).max():.0f}")
    assert off.max() < 0.25


@cocotb.test()
async def special_values(dut):
    """NaN and infinity in q, scales and least values; coefficients that round, vanish, are cut; scores beyond."""
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng)
    m, T = shape().m, shape().form.T
    kinds = ("plain", "nan in q", "infinite scale", "unused scale", "nan least", "large", "huge", "halves", "tiny")
    kinds += ("127.5", "zero q")
    for kind in kinds:
        q = any_q(numbers)
        widths = np.minimum(np.arange(m) % 3, shape().form.D // m + 1) * (np.arange(m) < shape().form.D)
        scale, least = (numbers.normal(0, 1, m).astype(np.float16) for _ in range(2))
        if kind == "nan in q":
            q[-1, 3] = np.nan
        elif kind == "infinite scale":
            scale[0], scale[4] = np.nan, -np.inf  # of a channel without digits, and with one
        elif kind == "unused scale":
            scale[0] = np.nan
        elif kind == "nan least":
            least[0] = np.nan
        elif kind == "large":
            least[5], q[:, 5] = -60000, 8
        elif kind == "huge":
            scale[:], q[:], widths = 65504, 65504, np.where(np.arange(m) < shape().form.D // 4, 4, 0)
        elif kind == "halves":  # of the largest coefficient's 64th
            q[:], scale[:] = 1, numbers.integers(-64, 64, m) / 128
            least[:] = numbers.integers(-5, 6, m) * 2.0**-21
            scale[1] = 64
        elif kind == "tiny":
            q[:], scale[:], least[:] = 2.0**-24, 2.0**-24, -(2.0**-24)
        elif kind == "127.5":
            q[:], scale[:] = 1, 255 / 128
        elif kind == "zero q":
            q[:] = 0
        page = score_page(shape(), scale, least, widths, numbers.integers(0, 256, (T, m)))[0]
        await bench.check(q, [([page] * shape().parts, T), ([page, *any_pages("even", numbers)[1:]], 5)])
        COVER.hit(kind)


@cocotb.test()
async def reset_in_a_page(dut):
    """Broken off in the head, in the lines, while scores are given out; the next page is right."""
    rng = await start(dut)
    numbers = np.random.default_rng(rng.getrandbits(32))
    blocks = shape().page_bytes // 16
    for stop in (3, blocks // 2, blocks):
        bench = Bench(dut, rng)
        await bench.load(any_q(numbers))
        await bench.s_page.send(beats(any_pages("even", numbers)[0], shape().form.T)[:stop])
        for _ in range(3 * shape().m if stop == blocks else 0):
            await RisingEdge(dut.clk)
        bench.stop()
        await reset(dut)
        bench = Bench(dut, rng)
        await bench.check(any_q(numbers), [(any_pages("wide", numbers), shape().form.T)])
        bench.stop()


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("bad", "good", "saturates", "fits", "nan in q", "large", "huge", "halves", "tiny", "127.5")
    COVER.require("s_page idle", "s_q idle", "m waits", "m held up")
    if shape().q_heads > 1:
        COVER.require("s_page held up")


SMALL = ProgressiveShape(head_dim=64, m=32, q_heads=2, page_bytes=768, k_bits=2)
NARROW = ProgressiveShape(head_dim=48, m=48, page_bytes=1024, k_bits=3)
PAGE = ProgressiveShape(head_dim=128, m=128)
GROUP = ProgressiveShape(head_dim=64, m=64, q_heads=3)
FEW = ProgressiveShape(head_dim=16, m=16, page_bytes=512, k_bits=1)  # scores hold up lines


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "shape"),
    [("icarus", SMALL), ("verilator", NARROW), ("verilator", PAGE), ("verilator", GROUP), ("verilator", FEW)],
    ids=["icarus", "48", "128", "64 x 3", "one line"],
)
def test_digit_scores(simulator, shape):
    simulate("digit_scores", shape.digit_scores(), simulator, covers=shape.q_heads > 1)
