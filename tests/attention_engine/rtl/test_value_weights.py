"""value_weights: weights of 7 bits, equal to the golden model."""

import cocotb
import numpy as np
import pytest
from cocotb.triggers import RisingEdge
from rtl_bench import PRESSURES, SPECIAL, Coverage, Sink, Source, pack, parameters, reset, simulate, start

from attention_engine.rtl.golden_progressive import value_weights

COVER = Coverage()
FIELDS = ("tdata", "tuser", "tlast")


def any_page(rng, kind, tokens):
    """Sizes (tokens,) and weights (G, tokens) as (sig, lift)."""
    if kind == "special":
        sizes = [rng.choice((*SPECIAL, 0x7C00, 0xFE00)) for _ in range(tokens)]
    elif kind == "wide":
        sizes = [rng.randrange(0x7C00) for _ in range(tokens)]
    else:
        sizes = [int(np.float16(rng.uniform(0.3, 1)).view(np.uint16)) for _ in range(tokens)]
    weights = []
    for _ in range(parameters()["Q_HEADS"]):
        few = 0 if kind == "zeros" else 1
        row = [(few * rng.getrandbits(rng.randrange(1, 18)), rng.randrange(0, 9)) for _ in range(tokens)]
        weights.append([(1 << 16, 8) if rng.random() < 0.01 * few else pair for pair in row])
    return sizes, weights


def due(sizes, weights):
    block, rows, bad = parameters()["BLOCK"], [], False
    for row in weights:
        W, power, out = value_weights([sig << lift for sig, lift in row], sizes)
        bad |= out
        rows.append((W, power))
        COVER.hit("least top" if power == 0 else "top", "largest" if 127 in W else "less")
    last = -(-len(sizes) // block) * block - block
    words = [
        {"tdata": pack(W[at : at + block], 7), "tuser": power, "tlast": int(at == last and g == len(rows) - 1)}
        for at in range(0, len(sizes), block)
        for g, (W, power) in enumerate(rows)
    ]
    return words, bad


class Bench:
    """The unit between sizes, weights and words."""

    def __init__(self, dut, rng, pressure=(0.0, 0.0)):
        self.dut, self.bad = dut, 0
        self.s_size, self.s_w = (Source(dut, name, rng, pressure[0], COVER) for name in ("s_size", "s_w"))
        self.sink = Sink(dut, "m", FIELDS, rng, pressure[1], COVER)
        self.task = cocotb.start_soon(self._watch())

    async def _watch(self):
        while True:
            await RisingEdge(self.dut.clk)
            self.bad += int(self.dut.rst.value == 0 and self.dut.bad.value == 1)

    async def sizes(self, pages):
        for sizes, _ in pages:
            padded = [*sizes, *[0xFFFF] * (8 * parameters()["HEAD"] - len(sizes))]
            await self.s_size.send({"tdata": pack(padded[at : at + 8], 16)} for at in range(0, len(padded), 8))

    async def weights(self, pages):
        for sizes, weights in pages:
            flat = [weights[g][t] for t in range(len(sizes)) for g in range(len(weights))]
            await self.s_w.send(
                {"sig": sig, "lift": lift, "tlast": int(i == len(flat) - 1)} for i, (sig, lift) in enumerate(flat)
            )

    async def check(self, pages):
        tasks = [cocotb.start_soon(one(pages)) for one in (self.sizes, self.weights)]
        for task in tasks:
            await task
        expected = [due(*page) for page in pages]
        want = [word for words, _ in expected for word in words]
        before = self.bad
        assert await self.sink.wait(len(want)) == want
        return before, any(bad for _, bad in expected)

    def stop(self):
        self.sink.task.cancel()
        self.task.cancel()
        self.dut.s_w_tvalid.value = self.dut.s_size_tvalid.value = 0


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_pages(dut, pressure):
    """Pages one after the other, whole and cut short; bad sizes are told."""
    rng = await start(dut)
    bench, most = Bench(dut, rng, pressure), 8 * parameters()["HEAD"]
    for kinds in (("plain",), ("wide", "plain", "zeros"), ("special",)):
        pages = [any_page(rng, kind, rng.choice((most, 1, rng.randrange(1, most + 1)))) for kind in kinds]
        bench.bad = 0
        await bench.check(pages)
        assert bool(bench.bad) == any(due(*page)[1] for page in pages)
        COVER.hit(*kinds)


@cocotb.test()
async def reset_in_a_page(dut):
    rng = await start(dut)
    for wait in (10, 60, 150):
        bench = Bench(dut, rng)
        pages = [any_page(rng, "plain", 8 * parameters()["HEAD"])]
        tasks = [cocotb.start_soon(one(pages)) for one in (bench.sizes, bench.weights)]
        for _ in range(wait):
            await RisingEdge(dut.clk)
        for task in tasks:
            task.cancel()
        bench.stop()
        await reset(dut)
        bench = Bench(dut, rng)
        await bench.check([any_page(rng, "plain", 9)])
        bench.stop()


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("least top", "top", "largest", "less", "special", "wide", "zeros")
    COVER.require("s_size idle", "s_w idle", "s_w held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "queries", "head", "block"), [("icarus", 2, 4, 16), ("verilator", 8, 28, 16), ("verilator", 3, 16, 8)]
)
def test_value_weights(simulator, queries, head, block):
    simulate("value_weights", {"Q_HEADS": queries, "HEAD": head, "BLOCK": block}, simulator)
